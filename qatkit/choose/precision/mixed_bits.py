"""Mixed bits: more bits for the weights on which the outputs depend most, and fewer for the others.

The loss of each weight is estimated for each number of bits (`qatkit.analysis.estimate`). It is the distance
of the outputs from float's if only this weight is rounded to the nearest. Losses are assumed to add up, so
the best choice for an average number of bits is a knapsack problem with one choice per weight
(`qatkit.choose.precision.bit_allocation`). Rounding algorithms run afterwards. They gain more for some
weights than for others, which the estimate ignores (decision 58).

int3 is not offered, since it takes 4 bits in a file.
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
    """Chooses 2, 4 or 8 bits for each weight, for a small loss at the outputs with a given average number of bits."""

    stage: ClassVar[str] = OBSERVED
    weights_alone: ClassVar[bool] = True
    changes_weights: ClassVar[bool] = False
    bits: float = setting(
        4.5,
        "largest average number of bits per value in the weights of Convs and Linears, without scales",
        Range(2, 8),
    )
    images: int = setting(16, "number of calibration samples on which losses are estimated", COUNT)

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        """Chooses the bits; `changed` counts the operators whose number of bits differs from the backend's.

        Args:
            graph_module: the prepared graph.
            inputs: batches, as for `calibrate`; only as many as needed are read.
        """
        from qatkit.choose.precision.bit_allocation import allocate

        return allocate(self, graph_module, inputs)

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """Returns the operators whose bits are set by an override, each with the reason."""
        from qatkit.choose.precision.bit_allocation import shared_weights

        return shared_weights(graph_module)[1]
