"""Weights that jump between two integers from step to step: how often, and what is done about it.

Source: Nagel et al., "Overcoming oscillations in quantization-aware training", 2022. A weight oscillates at a step
where its integer moves in the other direction than when it moved last; of that its frequency is a moving average.
Above `REPORTED` a weight counts as oscillating. One whose frequency passes a threshold is frozen: its integer becomes
the rounded average of those it had, for good, and only its scale moves on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOMENTUM = 0.01
REPORTED = 0.005
FIRST_THRESHOLD = 0.1


def annealed(start: float, end: float, progress: float) -> float:
    """From `start` to `end` by half a cosine; `progress` from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True)
class Oscillating:
    """One operator's weights: how many there are, oscillate and are frozen."""

    path: str
    weights: int
    oscillating: int
    frozen: int


class Oscillation(nn.Module):
    """What is remembered of the integers of one weight, all of the weight's shape and part of checkpoints.

    Args:
        kind: the type that holds integers as they are counted (`QuantSpec.counted`).

    Attributes:
        seen: rank 0, whether there are integers of a step before.
        whole: of type `kind`, the integers of the last step; of frozen weights those that stand.
        direction: int8, -1, 0 or 1, in which each moved last.
        frequency, average: float32, moving averages of oscillating and of the integers.
        frozen: bool.
    """

    seen: Tensor
    whole: Tensor
    direction: Tensor
    frequency: Tensor
    average: Tensor
    frozen: Tensor

    def __init__(self, weight: Tensor, kind: torch.dtype = torch.int8) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool, device=weight.device))
        for name, dtype in (("whole", kind), ("direction", torch.int8), ("frozen", torch.bool)):
            self.register_buffer(name, torch.zeros_like(weight, dtype=dtype, requires_grad=False))
        for name in ("frequency", "average"):
            self.register_buffer(name, torch.zeros_like(weight, dtype=torch.float32, requires_grad=False))

    @torch.no_grad()
    def update(self, integers: Tensor, threshold: float | None) -> None:
        """Takes in the integers of one step.

        Args:
            integers: float, of the weight's shape, as they are quantized now.
            threshold: frequency above which a weight is frozen; None: none is.
        """
        before = torch.where(self.seen, self.whole.float(), integers)
        moved = torch.sign(integers - before)
        turned = moved * self.direction < 0
        self.frequency.mul_(1 - MOMENTUM).add_(turned, alpha=MOMENTUM)
        self.direction.copy_(torch.where(moved == 0, self.direction, moved.to(torch.int8)))
        self.average.copy_(torch.where(self.seen, self.average, integers)).lerp_(integers, MOMENTUM)
        self.whole.copy_(integers)
        self.seen.fill_(True)
        if threshold is not None:
            now = (self.frequency > threshold) & ~self.frozen
            self.whole.copy_(torch.where(now, torch.round(self.average), integers))
            self.frozen |= now

    def held(self, integers: Tensor) -> Tensor:
        """`integers`, float, with those that stand in their places."""
        return torch.where(self.frozen, self.whole.to(integers.dtype), integers)

    def counted(self, path: str) -> Oscillating:
        """What there is to tell people. A frozen weight moves no more, so that it does not count as oscillating."""
        oscillating = (self.frequency > REPORTED) & ~self.frozen
        return Oscillating(path, self.whole.numel(), int(oscillating.sum()), int(self.frozen.sum()))
