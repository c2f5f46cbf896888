"""Base classes of algorithms that process a graph block by block: their settings, and notes on what they leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.algorithms.base import CALIBRATED, Algorithm
from qatkit.config.fields import COUNT, POSITIVE, Range, setting

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True)
class BlockAlgorithm(Algorithm):
    """An algorithm of one or more walks.

    Attributes:
        stays: words for what is left unchanged in an operator that the algorithm cannot improve.
        tables: whether it also changes weights that are tables of Embeddings.
    """

    stage: ClassVar[str] = CALIBRATED
    changes_weights: ClassVar[bool] = False
    stays: ClassVar[str]
    tables: ClassVar[bool] = False
    images: int = setting(
        256, "of the calibration images, whose activations between two blocks are kept", COUNT
    )
    batch_size: int = setting(
        4, "images kept together; a step takes several such lots of small tensors", COUNT
    )
    memory: int = setting(2048, "MiB of activations in memory; what is more is in temporary files", COUNT)

    def notes(self, graph_module: fx.GraphModule) -> list[tuple[str, str]]:
        """Returns (site, reason) of the quantized operators that it cannot change."""
        from qatkit.algorithms.blocks.lesson import changeable

        return changeable(graph_module, self.stays, tables=self.tables)[1]


@dataclass(frozen=True)
class LearnedRounding(BlockAlgorithm):
    """An algorithm that learns whether each weight is rounded up or down (`qatkit.algorithms.blocks.learn`)."""

    expensive: ClassVar[bool] = True
    stays: ClassVar[str] = "rounding not learned"
    steps: int = setting(100, "of Adam a block", COUNT)
    lr: float = setting(0.03, "of the variable behind each rounding", POSITIVE)
    strength: float = setting(
        10.0, "of the pull to up or down, in shares of the error at the start", Range(0)
    )
    warm: float = setting(0.2, "share of the steps before that", Range(0, 1))
