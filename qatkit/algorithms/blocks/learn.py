"""Learns the rounding of a block's weights from the error of its outputs.

    L = E_images |y' - y|²_F / E0 + λ · mean(1 - |2·h(V) - 1|^β)

y are the float block's outputs on float inputs, y' the quantized block's on quantized inputs (asymmetric, so
that errors of earlier blocks are compensated). |.|²_F weights every value with F if there is an F. E0 is
the error of rounding to the nearest, so λ has the same effect for blocks of any size. The quantizers inside
the block are on; those of its outputs only clamp to their bounds. A ReLU after the last operator therefore
counts, but the rounding after it does not. At the end the output errors over all images are compared, and the
learned rounding is dropped if it is not better than rounding to the nearest.
Sources: Nagel et al., 2020, section 3.3; Li et al., "BRECQ", 2021, equation 10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from qatkit.algorithms.blocks.journal import Found
from qatkit.algorithms.blocks.lesson import Lesson
from qatkit.algorithms.blocks.soft_rounding import SoftRounding, beta_at, regularizer
from qatkit.graph.nodes import module_of
from qatkit.graph.phase import set_phase
from qatkit.graph.quantizers import is_quantizer
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.qat_layers import QATOperator


@dataclass(frozen=True)
class Rounding:
    """Learns roundings; a `qatkit.algorithms.blocks.lesson.Learner`.

    Attributes:
        steps: number of steps of Adam, each on `Lesson.together` chunks of images.
        lr: learning rate of V.
        strength: the factor λ.
        warm: share of the steps, at the start, without the regularizer.
        bias_lr: learning rate of the biases, in the unit of the biases; 0: they are not learned.
    """

    steps: int
    lr: float
    strength: float
    warm: float
    bias_lr: float = 0.0

    def learn(self, lesson: Lesson) -> Found:
        """Returns `SITE.rounds_up` and `SITE.scale` of each operator, and `SITE.bias` if it is learned.

        The result is empty if rounding to the nearest is as good.
        """
        with _soft(lesson.operators, biases=self.bias_lr > 0) as soft, _outputs_clamp(lesson):
            order = chunk_order(lesson, self.steps)
            start = _nearest_error(lesson, soft)
            if start > 0:
                with torch.enable_grad():
                    self._fit(lesson, soft, order, start)
            return _kept(lesson, soft, start)

    def _fit(
        self, lesson: Lesson, soft: dict[str, SoftRounding], order: Sequence[Sequence[int]], start: float
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": [s.v for s in soft.values()], "lr": self.lr}]
        shifts = [s.shift for s in soft.values() if s.shift is not None]
        if shifts:
            groups.append({"params": shifts, "lr": self.bias_lr})
        optimizer = torch.optim.Adam(groups)
        for step, chunks in enumerate(order):
            loss = output_error(lesson, chunks) / start
            beta = beta_at(step, self.steps, self.warm)
            if beta is not None:
                values = sum(s.v.numel() for s in soft.values())
                loss = loss + self.strength / values * sum(regularizer(s.h(), beta) for s in soft.values())
            descend(optimizer, loss)

    def apply(self, lesson: Lesson, found: Found) -> None:
        """Fixes scale and rounding of each operator in `found`, and sets the learned biases."""
        for name, operator in lesson.operators.items():
            fake = operator.weight_fake_quant
            if fake is not None and f"{name}.rounds_up" in found:
                weight = operator.effective()[0]
                scale, up = (found[f"{name}.{part}"].to(weight.device) for part in ("scale", "rounds_up"))
                fake.fix(scale, weight, fake.below(weight, scale) + up)
            if operator.bias is not None and f"{name}.bias" in found:
                operator.bias.copy_(found[f"{name}.bias"])


def output_error(lesson: Lesson, chunks: Sequence[int]) -> Tensor:
    """Returns the weighted mean of (y' - y)² over all output values, rank 0."""
    outputs, targets = lesson.module(*lesson.inputs(chunks)), lesson.targets(chunks)
    pairs = [
        (y, target.to(y.dtype))
        for y, target in zip(outputs, targets, strict=True)
        if isinstance(y, Tensor) and y.is_floating_point()
    ]
    weights = [None] * len(pairs) if lesson.importance is None else lesson.importance(chunks)
    total = sum(
        ((y - target).square() * (1 if weight is None else weight)).sum()
        for (y, target), weight in zip(pairs, weights, strict=True)
    )
    return cast(Tensor, total) / sum(y.numel() for y, _ in pairs)


def mean_error(lesson: Lesson) -> float:
    """Returns `output_error` of the block in its current state, over all chunks."""
    return sum(float(output_error(lesson, [chunk])) for chunk in range(lesson.chunks)) / lesson.chunks


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Performs one step; only the optimizer's parameters get gradients, not those of the block."""
    learned = [p for group in optimizer.param_groups for p in group["params"]]
    for p, grad in zip(learned, torch.autograd.grad(loss, learned, allow_unused=True), strict=True):
        p.grad = grad
    optimizer.step()


def chunk_order(lesson: Lesson, steps: int) -> list[list[int]]:
    """Returns the chunks of each step in random order; all of them are used once before any is used again."""
    many = min(lesson.together, lesson.chunks)
    rounds = -(-steps * many // lesson.chunks)
    drawn = torch.cat([torch.randperm(lesson.chunks, generator=lesson.generator) for _ in range(rounds)])
    return cast("list[list[int]]", drawn[: steps * many].view(steps, many).tolist())


@contextmanager
def _soft(operators: dict[str, QATOperator], *, biases: bool) -> Iterator[dict[str, SoftRounding]]:
    """Replaces each operator's quantizer by a `SoftRounding` within the context."""
    fakes = {name: operator.weight_fake_quant for name, operator in operators.items()}
    soft = {}
    try:
        for name, operator in operators.items():
            fake = fakes[name]
            assert fake is not None
            soft[name] = SoftRounding(fake, *operator.effective(), biases=biases)
            operator.weight_fake_quant = cast(Any, soft[name])
        yield soft
    finally:
        for name, operator in operators.items():
            operator.weight_fake_quant = fakes[name]


@contextmanager
def _outputs_clamp(lesson: Lesson) -> Iterator[None]:
    """Turns on the quantizers of the block; those of its outputs only clamp, unless the block also reads them."""
    set_phase(lesson.module, observe=False, quantize=True)
    inside = set(lesson.block.nodes)
    for node in lesson.block.outputs:
        if is_quantizer(node) and not inside.intersection(node.users):
            cast(FakeQuantize, module_of(node)).enabled = False
    yield


def _nearest_error(lesson: Lesson, soft: dict[str, SoftRounding]) -> float:
    return _hard_error(lesson, soft, {name: one.nearest for name, one in soft.items()}, shifted=False)


def _hard_error(
    lesson: Lesson, soft: dict[str, SoftRounding], rounding: dict[str, Tensor], *, shifted: bool
) -> float:
    """Returns the output error over all chunks with final roundings."""
    before = {name: operator.weight_fake_quant for name, operator in lesson.operators.items()}
    for name, operator in lesson.operators.items():
        operator.weight_fake_quant = cast(Any, _Hard(soft[name], rounding[name], shifted))
    total = mean_error(lesson)
    for name, operator in lesson.operators.items():
        operator.weight_fake_quant = before[name]
    return total


class _Hard(torch.nn.Module):
    def __init__(self, soft: SoftRounding, rounds_up: Tensor, shifted: bool) -> None:
        super().__init__()
        self.soft, self.weight, self.shifted = soft, soft.hard(rounds_up), shifted

    def forward(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        del weight
        return self.weight, self.soft.shifted(bias) if self.shifted else bias


def _kept(lesson: Lesson, soft: dict[str, SoftRounding], start: float) -> Found:
    rounding = {name: one.rounds_up() for name, one in soft.items()}
    if not start > 0 or not _hard_error(lesson, soft, rounding, shifted=True) < start:
        return {}
    found: Found = {}
    for name, one in soft.items():
        found |= {f"{name}.rounds_up": rounding[name], f"{name}.scale": one.scale}
        operator = lesson.operators[name]
        if one.shift is not None and operator.bias is not None:
            found[f"{name}.bias"] = operator.bias.detach() + one.shift.detach()
    return found
