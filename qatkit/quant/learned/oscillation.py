"""Oscillating weights, which jump between two integers from step to step: counted, and frozen on request.

Source: Nagel et al., "Overcoming oscillations in quantization-aware training", 2022. A weight oscillates at a
step where its integer moves in the opposite direction to its last move. Its frequency is the moving average
of these events. A weight with a frequency above `REPORTED` is reported as oscillating. A weight whose
frequency exceeds a threshold is frozen: its integer becomes the rounded average of its past integers for
good, and only its scale continues to change.
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
    """Returns the value between `start` and `end` on half a cosine at `progress`, from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True)
class Oscillating:
    """The counts of an operator's weights: all, the oscillating ones and the frozen ones."""

    path: str
    weights: int
    oscillating: int
    frozen: int


class Oscillation(nn.Module):
    """The history of the integers of one weight, in buffers of the weight's shape that are part of checkpoints.

    Args:
        weight: the weight.
        kind: the type that holds integers counted from the zero point (`QuantSpec.counted`).

    Attributes:
        seen: whether there are integers of an earlier step, rank 0.
        whole: the integers of the last step, of type `kind`; for frozen weights, the frozen integers.
        direction: int8, the direction of the last move: -1, 0 or 1.
        frequency, average: float32, moving averages of oscillation and of the integers.
        frozen: bool, true for frozen weights.
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
        """Updates the history with the integers of one step.

        Args:
            integers: the current integers, float, in the weight's shape.
            threshold: the frequency above which a weight is frozen; None: no weight is frozen.
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
        """Returns `integers`, float, with the frozen integers in place of the current ones."""
        return torch.where(self.frozen, self.whole.to(integers.dtype), integers)

    def counted(self, path: str) -> Oscillating:
        """Returns the counts for reports; a frozen weight no longer moves, so it does not count as oscillating."""
        oscillating = (self.frequency > REPORTED) & ~self.frozen
        return Oscillating(path, self.whole.numel(), int(oscillating.sum()), int(self.frozen.sum()))
