"""LSTM, GRU and RNN whose weights are quantized, with one scale per row of each gate, and that compute in float.

torch's recurrent modules run on a list of their weights; here that list is made again when it is read, of the values
that the file will hold. Their forward is torch's own, so are the names of their parameters, and gradients reach these
straight through the rounding. Biases stay float.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from qatkit.quant.weight_fake_quantize import WeightFakeQuantize


class QATRecurrent(nn.RNNBase):
    """What the three have in common.

    Attributes:
        weight_fake_quants: by the name of the weight [gates · hidden, inputs].
    """

    weight_fake_quants: nn.ModuleDict

    def _values(self) -> list[Tensor]:
        return [self._value(name) for name in self._flat_weights_names]

    def _ignore(self, values: list[Tensor]) -> None:
        """The list follows the parameters by itself."""

    _flat_weights: Any = property(_values, _ignore, doc="Weights and biases as they will ship.")

    def _value(self, name: str) -> Tensor:
        tensor = cast(Tensor, getattr(self, name))
        return self.quantizer(name)(tensor)[0] if name in self.weight_fake_quants else tensor

    def quantizer(self, name: str) -> WeightFakeQuantize:
        """Of a weight, by its name."""
        return cast(WeightFakeQuantize, self.weight_fake_quants[name])

    def _update_flat_weights(self) -> None:
        """Nothing to update."""

    def flatten_parameters(self) -> None:
        """One block of memory for all weights, which cuDNN likes, is not to be had of computed ones."""


class QATLSTM(QATRecurrent, nn.LSTM):
    """LSTM with quantized weights."""


class QATGRU(QATRecurrent, nn.GRU):
    """GRU with quantized weights."""


class QATRNN(QATRecurrent, nn.RNN):
    """RNN with quantized weights."""


RECURRENT_TYPES: dict[str, type[QATRecurrent]] = {"lstm": QATLSTM, "gru": QATGRU, "rnn": QATRNN}


def weight_names(module: nn.RNNBase) -> Iterator[str]:
    """Names of the weights, without the biases."""
    return (name for names in module._all_weights for name in names if name.startswith("weight"))
