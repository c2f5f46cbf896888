"""Sequential MSE: ranges of weights with the least error at the operators' outputs, one operator after the other.

    clip_c = argmin_k E_images (op(x', W'_k)_c - op(x, W)_c)²        W'_k rounded with the range k · max|W_c|

c is an output channel. x is the float input; x' is the quantized one, after operators whose ranges are
already chosen. The shares k are `candidates` values, evenly from `least` to 1. Each is tried as it would be
exported, with the aligned scale and the rounded bias. With per-channel scales every channel takes its own
share; with one scale per tensor the error is summed over the channels. Minimizing the squared error of the
weight itself (calibration.weights=mse) ignores the inputs: a weight for large inputs then counts as much as
one whose inputs are zero.
Sources: AIMET's sequential MSE and NVIDIA Model Optimizer's mse calibration of weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.blocks.algorithm import BlockAlgorithm
from qatkit.config.fields import COUNT, Range, setting
from qatkit.graph.pass_result import PassResult

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.signature import Example

_TITLE = "sequential mse"


@dataclass(frozen=True)
class SequentialMSE(BlockAlgorithm):
    """Chooses the range of every weight by the output error of its operator."""

    stays: ClassVar[str] = "range not searched"
    images: int = setting(
        64,
        "number of calibration samples; their activations are stored between one operator and the next",
        COUNT,
    )
    batch_size: int = setting(8, "number of samples per batch", COUNT)
    candidates: int = setting(20, "number of ranges to try", Range(2))
    least: float = setting(
        0.4, "smallest range to try, as a share of the weight's largest value", Range(0.01, 1)
    )

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Chooses the ranges; `changed` counts the weights with a smaller range. Fake quantization is on afterwards.

        Args:
            graph_module: the calibrated graph.
            inputs: batches as for `calibrate`; no more are read than needed.
        """
        from qatkit.algorithms.blocks.partition import layers
        from qatkit.algorithms.blocks.range_search import RangeSearch, even_shares, weight_quantizer
        from qatkit.algorithms.blocks.walk import BlockWalk

        walker = BlockWalk.of(self, graph_module, inputs)
        walker.walk(layers(graph_module), RangeSearch(even_shares(self.least, self.candidates)), _TITLE)
        changed = sum(bool((weight_quantizer(one).clip < 1).any()) for one in walker.operators.values())
        return PassResult(graph_module, changed, walker.skipped)
