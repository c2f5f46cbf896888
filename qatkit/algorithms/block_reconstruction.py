"""Block reconstruction."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qatkit.algorithms.base import CALIBRATED, Algorithm
from qatkit.algorithms.blocks.journal import Journal, current, settings_of
from qatkit.algorithms.blocks.learn import Rounding
from qatkit.algorithms.blocks.partition import blocks, layers
from qatkit.algorithms.blocks.walk import changeable, chunks_of, key_of, walk
from qatkit.config.fields import COUNT, POSITIVE, Range, setting
from qatkit.graph.pass_result import PassResult
from qatkit.graph.signature import Example

_MIB = 2**20

@dataclass(frozen=True)
class BlockReconstruction(Algorithm):
    """Rounds."""

    stage: ClassVar[str] = CALIBRATED
    images: int = setting(128, "of the calibration images", COUNT)
    steps: int = setting(200, "of Adam a block", COUNT)
    lr: float = setting(0.01, "of the roundings", POSITIVE)
    bias_lr: float = setting(0.0, "of the biases", Range(0))
    strength: float = setting(1.0, "of the regularizer", Range(0))
    warm: float = setting(0.2, "share", Range(0, 1))
    batch_size: int = setting(4, "images of a chunk", COUNT)
    operators: int = setting(5, "at most in a block", COUNT)
    memory: int = setting(1024, "MiB", COUNT)

    def __call__(self, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
        chosen, skipped = changeable(graph_module, "rounding not learned")
        batches = chunks_of(graph_module, inputs, self.images, self.batch_size)
        journal = Journal(current().file, key_of(graph_module, batches, settings_of(self)))
        parts = blocks(graph_module, self.operators) if self.operators > 0 else layers(graph_module)
        done = walk(
            graph_module, parts, batches,
            Rounding(self.steps, self.lr, self.strength, self.warm, self.bias_lr),
            chosen, journal, title="block reconstruction", memory=self.memory * _MIB,
        )
        return PassResult(graph_module, done, skipped)
