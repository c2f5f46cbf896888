"""Scales of activations, learned from the error of a block's outputs.

    y = s · clip(round(x / s), low, high)        s = s0 · exp(p), p learned

with the gradient of LSQ: round(v) - v for v = x / s within the range, and the range's end beyond it. The zero
point is fixed, so that the range shrinks and grows around zero. Meanwhile weights are rounded to the nearest.
Sources: Esser et al., "Learned step size quantization", 2020, equation 3; Hubara et al., "AdaQuant", 2021,
section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from qatkit.algorithms.blocks.journal import Found
from qatkit.algorithms.blocks.learn import chunk_order, descend, mean_error, output_error
from qatkit.algorithms.blocks.lesson import Lesson
from qatkit.graph.nodes import module_of, site
from qatkit.graph.phase import set_phase
from qatkit.graph.quantizers import fake_quantizers, is_quantizer
from qatkit.graph.scales.align import align
from qatkit.quant.fake_quantize import FakeQuantize


@dataclass(frozen=True)
class Scales:
    """Learns scales; a `qatkit.algorithms.blocks.lesson.Learner`.

    Attributes:
        steps: number of steps of Adam, each on `Lesson.together` chunks of images.
        lr: learning rate of p.
    """

    steps: int
    lr: float

    def learn(self, lesson: Lesson) -> Found:
        """Returns the learned scales by site; empty if the block has none or the current ones are as good."""
        set_phase(lesson.module, observe=False, quantize=True)
        start = mean_error(lesson)
        with _learned(lesson) as learned:
            if not learned or not start > 0:
                return {}
            optimizer = torch.optim.Adam([one.p for one in learned.values()], lr=self.lr)
            with torch.enable_grad():
                for chunks in chunk_order(lesson, self.steps):
                    loss = output_error(lesson, chunks) / start
                    descend(optimizer, loss)
            if not mean_error(lesson) < start:
                return {}
            return {name: one.scale().detach().clone() for name, one in learned.items()}

    def apply(self, lesson: Lesson, found: Found) -> None:
        """Sets the learned scales, which later blocks then use; `settle` makes them permanent."""
        for node, quantizer in _movable(lesson).items():
            if site(node) in found:
                quantizer.scale.copy_(found[site(node)])


class LearnedScale(nn.Module):
    """Replaces a `FakeQuantize` in the graph while its scale is learned."""

    def __init__(self, quantizer: FakeQuantize) -> None:
        super().__init__()
        self.first = quantizer.scale.detach().clone()
        zero, (low, high) = int(quantizer.zero_point), quantizer.spec.type_range
        self.low, self.high = low - zero, high - zero
        self.p = nn.Parameter(torch.zeros_like(self.first))

    def scale(self) -> Tensor:
        """Returns the scale, rank 0."""
        return self.first * self.p.exp()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the quantized x, in its shape."""
        scale = self.scale()
        v = torch.clamp(x / scale, self.low, self.high)
        return (v + (torch.round(v) - v).detach()) * scale


def settle(graph_module: fx.GraphModule) -> None:
    """Makes learned scales permanent: sets the observers' ranges accordingly, and aligns all scales again."""
    for quantizer in fake_quantizers(graph_module).values():
        if quantizer.movable and quantizer.observer is not None:
            zero, spec = int(quantizer.zero_point), quantizer.spec
            quantizer.observer.low.copy_((spec.quant_min - zero) * quantizer.scale)
            quantizer.observer.high.copy_((spec.quant_max - zero) * quantizer.scale)
    align(graph_module)


def _movable(lesson: Lesson) -> dict[fx.Node, FakeQuantize]:
    found = {node: module_of(node) for node in lesson.block.nodes if is_quantizer(node)}
    return {n: q for n, q in found.items() if isinstance(q, FakeQuantize) and q.movable}


@contextmanager
def _learned(lesson: Lesson) -> Iterator[dict[str, LearnedScale]]:
    """Puts a `LearnedScale` in the place of each movable quantizer of the block, within the context."""
    movable = _movable(lesson)
    learned = {site(node): LearnedScale(quantizer) for node, quantizer in movable.items()}
    for node in movable:
        lesson.module.set_submodule(str(node.target), learned[site(node)])
    try:
        yield learned
    finally:
        for node, quantizer in movable.items():
            lesson.module.set_submodule(str(node.target), quantizer)
