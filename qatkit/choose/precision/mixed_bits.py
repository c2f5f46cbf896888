"""Mixed bits: more of them for the weights that the outputs depend on most, fewer for the others.

The loss of each weight with each number of bits is estimated (`qatkit.analysis.estimate`): how far the
outputs are from float's with only this weight rounded to nearest. Losses add up, so the best choice for
an average number of bits is a knapsack with one choice per weight (`qatkit.choose.precision.bit_allocation`).
Algorithms that round come afterwards. They gain more on some weights than on others, which the estimate does
not know (decision 58).

int3 is no choice: it takes 4 bits in a file.
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
class MixedBits(Algorithm):
    """Gives each weight 2, 4 or 8 bits, so that the outputs lose least with so many on average."""

    stage: ClassVar[str] = OBSERVED
    weights_alone: ClassVar[bool] = True
    changes_weights: ClassVar[bool] = False
    bits: float = setting(
        4.5, "average number of bits per weight of Conv and Linear, not counting scales", Range(2, 8)
    )
    images: int = setting(16, "number of calibration images on which losses are estimated", COUNT)

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Chooses the bits; `changed` counts the operators whose number of bits differs from the backend's.

        Args:
            graph_module: prepared.
            inputs: batches, as for `calibrate`, read no further than needed.
        """
        from qatkit.choose.precision.bit_allocation import allocate

        return allocate(self, graph_module, inputs)

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """Returns the operators whose bits an override sets, with the reason."""
        from qatkit.choose.precision.bit_allocation import shared_weights

        return shared_weights(graph_module)[1]
