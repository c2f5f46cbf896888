"""Chooses the range of a weight by the error of its operator's output (`qatkit.algorithms.SequentialMSE`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qatkit.algorithms.blocks.journal import Found
from qatkit.algorithms.blocks.lesson import Lesson
from qatkit.quant.granularity import along
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize


def even_shares(least: float, count: int) -> list[float]:
    """Returns `count` shares of the largest value, evenly from 1 down to `least`."""
    found: list[float] = torch.linspace(1.0, least, count).tolist()
    return found


@dataclass(frozen=True)
class RangeSearch:
    """A `qatkit.algorithms.blocks.lesson.Learner` for blocks with one operator, the first node of each block.

    Attributes:
        shares: the candidates for the range, as shares of the largest |weight|; the first of equally good
            ones is taken.
    """

    shares: list[float]

    def learn(self, lesson: Lesson) -> Found:
        return {f"{name}.clip": self._best(lesson, operator) for name, operator in lesson.operators.items()}

    def _best(self, lesson: Lesson, operator: QATOperator) -> Tensor:
        fake = weight_quantizer(operator)
        fake.set_phase(observe=False, quantize=True)
        full, before = torch.ones_like(fake.clip), fake.clip.clone()
        tried = []
        for share in self.shares:
            fake.clip_to(full * share)
            tried.append(operator.quantized(*operator.effective()))
        fake.clip_to(before)
        total = torch.zeros(())  # [candidates, channels] in the end
        for chunk in range(lesson.chunks):
            wanted = operator.run(lesson.originals([chunk])[0], *operator.effective())
            x = lesson.inputs([chunk])[0]
            errors = [squared_errors(operator.run(x, *one) - wanted, operator) for one in tried]
            total = total.to(x.device) + torch.stack(errors)
        best = (total if fake.spec.granularity.separates(0) else total.sum(1)).argmin(0)
        return torch.tensor(self.shares, device=best.device)[best]

    def apply(self, lesson: Lesson, found: Found) -> None:
        for name, operator in lesson.operators.items():
            fake = weight_quantizer(operator)
            fake.clip_to(along(found[f"{name}.clip"], 0, fake.clip.ndim))


def squared_errors(difference: Tensor, operator: QATOperator) -> Tensor:
    """Returns the squared error [channels] of an operator's output, summed over all other axes; float64."""
    axis = difference.ndim - operator.weight.ndim + 1  # Conv: [N, C, ...] or [C, ...]; Linear: [..., C]
    return difference.double().square().sum([d for d in range(difference.ndim) if d != axis])


def weight_quantizer(operator: QATOperator) -> WeightFakeQuantize:
    """Returns the weight quantizer of a `changeable` operator."""
    fake = operator.weight_fake_quant
    assert fake is not None
    return fake
