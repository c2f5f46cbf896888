"""What algorithms that go through a graph block by block have in common: settings, and what they leave as it is."""

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
        stays: what of an operator is left as it is where the algorithm can do nothing, in words.
        tables: whether it changes weights that are tables of Embeddings, too.
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
        """The quantized operators that it can do nothing about."""
        from qatkit.algorithms.blocks.lesson import changeable

        return changeable(graph_module, self.stays, tables=self.tables)[1]


@dataclass(frozen=True)
class LearnedRounding(BlockAlgorithm):
    """One that learns whether each weight is rounded up or down (`qatkit.algorithms.blocks.learn`)."""

    expensive: ClassVar[bool] = True
    stays: ClassVar[str] = "rounding not learned"
    steps: int = setting(100, "of Adam a block", COUNT)
    lr: float = setting(0.03, "of the variable behind each rounding", POSITIVE)
    strength: float = setting(
        10.0, "of the pull to up or down, in shares of the error at the start", Range(0)
    )
    warm: float = setting(0.2, "share of the steps before that", Range(0, 1))
