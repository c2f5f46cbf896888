"""Base classes of algorithms that process a graph block by block: settings, and notes on unchanged operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.base import CALIBRATED, Algorithm
from qatkit.config.fields import COUNT, POSITIVE, Range, setting

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True)
class BlockAlgorithm(Algorithm):
    """An algorithm that walks through the blocks of a graph one or more times.

    Attributes:
        stays: the beginning of the note on an operator that the algorithm cannot change, such as "rounding
            not learned".
        tables: whether it also changes weights that Embeddings use as their tables.
    """

    stage: ClassVar[str] = CALIBRATED
    changes_weights: ClassVar[bool] = False
    stays: ClassVar[str]
    tables: ClassVar[bool] = False
    images: int = setting(
        256,
        "number of calibration samples; their activations are stored between one block and the next "
        "(for adaround and gptq, each operator is a block)",
        COUNT,
    )
    batch_size: int = setting(
        4,
        "number of samples that are stored together; where tensors are small, a step uses several of these batches",
        COUNT,
    )
    memory: int = setting(
        2048, "largest size of activations in memory, in MiB; the rest is stored in temporary files", COUNT
    )

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """Returns (site, reason) of the quantized operators that the algorithm cannot change."""
        from qatkit.algorithms.blocks.lesson import changeable

        return changeable(graph_module, self.stays, tables=self.tables)[1]


@dataclass(frozen=True)
class LearnedRounding(BlockAlgorithm):
    """An algorithm that learns whether each weight is rounded up or down (`qatkit.algorithms.blocks.learn`)."""

    expensive: ClassVar[bool] = True
    stays: ClassVar[str] = "rounding not learned"
    steps: int = setting(100, "number of Adam steps per block", COUNT)
    lr: float = setting(0.03, "learning rate of the variables that choose the roundings", POSITIVE)
    strength: float = setting(
        10.0,
        "weight of the loss term that pushes each rounding fully up or down, relative to the initial error",
        Range(0),
    )
    warm: float = setting(
        0.2, "share of the steps, at the start, that are computed with strength=0", Range(0, 1)
    )
