"""LSTM, GRU and RNN that compute in float with quantized weights, one scale per row of each gate.

torch's recurrent modules run on a list of their weights. Here that list is rebuilt at every read from the
values that the file will hold. The forward pass and the names of the parameters are torch's own, and
gradients pass straight through the rounding. Biases stay float.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from qatkit.quant.weight_fake_quantize import WeightFakeQuantize


class QATRecurrent(nn.RNNBase):
    """The base class of the quantized recurrent layers.

    Attributes:
        weight_fake_quants: the quantizer of each weight [gates · hidden, inputs], by its name.
    """

    weight_fake_quants: nn.ModuleDict

    def _values(self) -> list[Tensor]:
        return [self._value(name) for name in self._flat_weights_names]

    def _ignore(self, values: list[Tensor]) -> None:
        """Ignores assignments: the list follows the parameters by itself."""

    _flat_weights: Any = property(
        _values, _ignore, doc="The weights with their values in the file, and the biases."
    )

    def _value(self, name: str) -> Tensor:
        tensor = cast(Tensor, getattr(self, name))
        return self.quantizer(name)(tensor)[0] if name in self.weight_fake_quants else tensor

    def quantizer(self, name: str) -> WeightFakeQuantize:
        """Returns the quantizer of a weight by the weight's name."""
        return cast(WeightFakeQuantize, self.weight_fake_quants[name])

    def _update_flat_weights(self) -> None:
        """Does nothing: the list is rebuilt at every read."""

    def flatten_parameters(self) -> None:
        """Does nothing: computed weights cannot share one block of memory, which cuDNN prefers."""


class QATLSTM(QATRecurrent, nn.LSTM):
    """LSTM with quantized weights."""


class QATGRU(QATRecurrent, nn.GRU):
    """GRU with quantized weights."""


class QATRNN(QATRecurrent, nn.RNN):
    """RNN with quantized weights."""


RECURRENT_TYPES: dict[str, type[QATRecurrent]] = {"lstm": QATLSTM, "gru": QATGRU, "rnn": QATRNN}


def weight_names(module: nn.RNNBase) -> Iterator[str]:
    """Returns the names of the weights, without the biases."""
    return (name for names in module._all_weights for name in names if name.startswith("weight"))
