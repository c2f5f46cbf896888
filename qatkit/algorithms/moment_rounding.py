"""Rounds weights up or down so that the error of the operator's output is least, without training.

For a row w of a weight, rounded to w + e, the mean squared error of the output is a quadratic form of e:

    E[(e·x)²]  =  e·C·e + (e·μ)²        C: covariance, μ: mean of the inputs x, from a few images

The bias compensates for e·μ, which leaves e·C·e. Starting from the nearest integers, each weight in turn is
moved by δ = ± one step to its other neighbour if that makes the form smaller, 2·δ·(C·e)_i + δ²·C_ii < 0. This
is repeated until hardly any weight moves, at most `rounds` times. For an operator whose bias cannot be
changed, C is the matrix of second moments, which include the mean.

Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020, section 3.2,
equation 13: AdaRound's objective layer by layer, by coordinate descent on the rounding itself instead of
gradients on a relaxed one (figures: docs/decisions/0019-cheap-algorithms.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.base import CALIBRATED, Algorithm
from qatkit.config.fields import COUNT, Range, setting

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.pass_result import PassResult
    from qatkit.graph.signature import Example


@dataclass(frozen=True)
class MomentRounding(Algorithm):
    """Rounds each weight up or down so that outputs change least, and subtracts their mean error from the bias."""

    stage: ClassVar[str] = CALIBRATED
    changes_weights: ClassVar[bool] = False
    images: int = setting(64, "number of calibration samples for the moments of the operators' inputs", COUNT)
    damping: float = setting(
        0.01, "share of the mean variance that is added to that of each input, against overfitting", Range(0)
    )
    rounds: int = setting(4, "largest number of rounds over all weights of an operator", COUNT)

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Rounds the weights; `changed` counts the operators.

        Afterwards fake quantization is on, and the operators' scales and rounding are fixed.

        Args:
            graph_module: the prepared graph, with ranges.
            inputs: batches as for `calibrate`; no more are read than needed.
        """
        from qatkit.algorithms.rounding_by_moments import round_weights

        return round_weights(self, graph_module, inputs)

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """Returns (site, reason) of the quantized operators whose rounding is not chosen."""
        from qatkit.algorithms.rounding_by_moments import roundable

        return roundable(graph_module)[1]
