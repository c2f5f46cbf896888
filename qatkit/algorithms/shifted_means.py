"""Finds rounded weights whose error is mostly a shift of their outputs' means, and corrects their biases by default.

    y = W·x + b      rounded: W' = W + R      R·x = R·E[x] + R·(x - E[x])
                                                    ──────  for inputs far from zero (pixels 0..255, after a SiLU)
                                                            the larger part, and the same for every image

In ordinary networks, the operators' inputs lie around zero, and each operator's outputs keep 35 dB or more
with rounded weights. An operator that falls below `KEPT` is corrected if a shift of the bias helps (figures:
decision 46).
Algorithms of `algorithm=` that change biases replace this correction (`qatkit.algorithms.biases`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from qatkit.algorithms import biases
from qatkit.algorithms.bias_errors import hooked, targets
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.signature import Example, inputs_of
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.spec import WHOLE

# A shift is corrected if the outputs with rounded weights reach less than KEPT dB, and the correction gains
# WON dB.
KEPT, WON = 33.0, 6.0
_LEAST = 256  # number of values that a channel must have for its mean to be significant


@dataclass(frozen=True)
class ShiftedMean:
    """An operator whose outputs are shifted by the rounding of its weight.

    Attributes:
        site: the site of the operator.
        before_db, after_db: ratio of the outputs' variance to the squared error, in dB, with the shift and without it.
        shift: the shift of each channel, [channels].
    """

    site: str
    before_db: float
    after_db: float
    shift: tuple[float, ...]


def shifted_means(
    graph_module: fx.GraphModule, batches: Iterable[Example], *, correct: bool = True
) -> list[ShiftedMean]:
    """Returns the operators whose outputs are shifted by rounded weights, and corrects their biases if `correct`.

    These are the operators with a ratio below `KEPT` that rises by at least `WON` without the shift. Operators
    without 8-bit weights or without a bias that can be corrected are left out.

    Args:
        graph_module: the prepared graph, with ranges; its phase does not change.
        batches: batches as for `calibrate`; a few images are enough.
        correct: whether to correct the biases.
    """
    chosen = {
        operator: name
        for name, operator in targets(graph_module)[0].items()
        if operator.weight_fake_quant is not None and operator.weight_fake_quant.spec.dtype in WHOLE
    }
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=True)
        sums = {operator: _Sums(operator) for operator in chosen}
        set_phase(graph_module, observe=False, quantize=False)
        with hooked(chosen, lambda operator, args, y: sums[operator].add(args[0], y)):
            for batch in batches:
                graph_module(*inputs_of(graph_module, batch))
        found = []
        for operator, one in sums.items():
            before, after = one.decibels()
            if one.count < _LEAST or before >= KEPT or after - before < WON:
                continue
            shift = (one.error / one.count).float()
            found.append(ShiftedMean(chosen[operator], before, after, tuple(shift.tolist())))
            if correct:
                take_back(operator, shift)
    return found


def take_back(operator: QATOperator, shift: Tensor) -> None:
    """Subtracts the shift [channels] of an operator's outputs from its bias."""
    assert operator.bias is not None
    biases.change(operator, operator.bias - shift.to(operator.bias))


class _Sums:
    """The sums over one operator's outputs y and their errors, channel by channel."""

    def __init__(self, operator: QATOperator) -> None:
        self._operator = operator
        weight, _ = cast(Any, operator).quantized(operator.weight, operator.bias)
        self._rounding = (weight - operator.weight).detach()
        self.count = 0
        self.y: Any = 0
        self.y_squared: Any = 0
        self.error: Any = 0
        self.error_squared: Any = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        error = self._operator.run(x, self._rounding, None)
        axis = y.ndim - 1 if isinstance(self._operator, nn.Linear) else 1
        others = [one for one in range(y.ndim) if one != axis]
        self.count += y.numel() // max(1, y.shape[axis])
        self.y += y.sum(others, dtype=torch.float64)
        self.y_squared += y.square().sum(others, dtype=torch.float64)
        self.error += error.sum(others, dtype=torch.float64)
        self.error_squared += error.square().sum(others, dtype=torch.float64)

    def decibels(self) -> tuple[float, float]:
        """Returns the ratios of the outputs' variance to the squared error, with and without its mean, in dB."""
        if not self.count:
            return math.inf, math.inf
        signal = float((self.y_squared - self.y.square() / self.count).sum())
        error = float(self.error_squared.sum())
        left = float((self.error_squared - self.error.square() / self.count).sum())
        return _decibel(signal, error), _decibel(signal, left)


def _decibel(signal: float, error: float) -> float:
    return 10 * math.log10(max(signal, 1e-300) / error) if error > 0 else math.inf
