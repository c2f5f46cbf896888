"""SmoothQuant: activations with a few large channels become easy to quantize.

The weights that read an activation are multiplied by the factors that divide it.

    reader(x)  =  reader·diag(s) (x / s)        s_j = max|X_j|^α / max|W_j|^(1 - α)

The division is free where x comes from an operator whose output channels have parameters of their own: a
LayerNorm, GroupNorm, RMSNorm or BatchNorm, a Conv or Linear, a product with a parameter. Readers are found by
following the channels through the graph (`qatkit.graph.channels`): through the heads of attention, a ReLU,
poolings and views; all readers are scaled alike. Channels with a reader that does not commute with a
factor are not scaled.

Unless `strength` is set, the strength α of each source is chosen from a grid and "none", by the error of the
readers' outputs, |r(q(x/s), q(W·s)) - r(x, W)|² / |r(x, W)|². The input is quantized per tensor, and the
weights as the backend defines. The range of the input is the one of least squared error if the observer keeps
a histogram; otherwise it includes all values.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", 2023, section 4, equation 4 (figures: docs/decisions/0019-cheap-algorithms.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.base import OBSERVED, Algorithm
from qatkit.config.fields import COUNT, Range, setting

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.pass_result import PassResult
    from qatkit.graph.signature import Example


@dataclass(frozen=True)
class SmoothQuant(Algorithm):
    """Moves range differences between an activation's channels into the next weights, without changing the function."""

    stage: ClassVar[str] = OBSERVED
    rescales: ClassVar[bool] = True
    formats: ClassVar[bool] = True
    strength: float | None = setting(
        None,
        "share of the range differences that is moved; null: the best share for each tensor is searched",
        Range(0, 1),
    )
    steps: int = setting(
        10,
        "number of intervals between the strengths that are tried with strength=null: 0, 1/steps, ..., 1; "
        "the tensor without smoothing is also tried",
        COUNT,
    )
    images: int = setting(
        128, "number of calibration samples in which the largest value of each channel is measured", COUNT
    )

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Scales the channels; `changed` counts the sources that were scaled.

        Args:
            graph_module: the prepared graph; its ranges are found afterwards.
            inputs: batches as for `calibrate`; no more are read than needed.
        """
        from qatkit.algorithms.smooth_factors import smooth

        return smooth(self, graph_module, inputs)

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """Returns (site, reason) of the operators whose outputs cannot be scaled."""
        from qatkit.algorithms.smooth_factors import smoothable

        return smoothable(graph_module)[1]
