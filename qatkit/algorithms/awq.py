"""AWQ: weights that are multiplied by large activations are scaled up, which reduces their relative rounding error.

    reader(x)  =  reader·diag(s) (x / s)        s_j = (E[x_j²])^(α/2)

All weights of a quantization block share one scale and have errors of the same size, whatever their inputs.
For a weight that is multiplied by s_j, the rounding error in the output is divided by s_j. The division of x
costs nothing where x comes from an operator (the source) with parameters for each output channel, which can
absorb it. The sources and their readers are found in the graph, as for `SmoothQuant`.

The strength α of each source is the candidate with the least error of the readers' outputs, (W -
q(W·s)/s)·H·(W - q(W·s)/s)ᵀ with H the second moments of the inputs. One candidate is no scaling. The paper
measures channels by E|x_j|.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
Acceleration", 2024, section 3.2, equations 4 and 5 (figures: docs/decisions/0063-awq.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.base import OBSERVED, Algorithm
from qatkit.config.fields import COUNT, setting

if TYPE_CHECKING:
    from torch import fx

    from qatkit.graph.pass_result import PassResult
    from qatkit.graph.signature import Example


@dataclass(frozen=True)
class AWQ(Algorithm):
    """Scales weights up where their inputs are large, and divides the inputs by the same factors."""

    stage: ClassVar[str] = OBSERVED
    rescales: ClassVar[bool] = True
    weights_alone: ClassVar[bool] = True
    images: int = setting(64, "number of calibration samples for the second moments of the inputs", COUNT)
    steps: int = setting(
        20,
        "number of exponents of the scaling that are tried: 1/steps, 2/steps, ..., 1, and also 0 (no scaling)",
        COUNT,
    )

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Scales the weights; `changed` counts the sources that were scaled.

        Args:
            graph_module: the prepared graph; its ranges are found afterwards.
            inputs: batches as for `calibrate`; no more are read than needed.
        """
        from qatkit.algorithms.awq_factors import scale

        return scale(self, graph_module, inputs)

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """Returns (site, reason) of the operators whose outputs cannot be scaled."""
        from qatkit.algorithms.awq_factors import scalable

        return scalable(graph_module)[1]
