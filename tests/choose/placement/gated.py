"""A small net whose operators may run in float or int8: SiLUs, a depthwise Conv, a gate, a sum and a pool."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class Gated(nn.Module):
    """An inverted residual block between a stem and a head."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.silu = nn.Conv2d(3, width, 3, padding=1), nn.SiLU()
        self.expand, self.silu1 = nn.Conv2d(width, 2 * width, 1), nn.SiLU()
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.silu2, self.squeeze = nn.SiLU(), nn.AdaptiveAvgPool2d(1)
        self.gate, self.sigmoid = nn.Conv2d(2 * width, 2 * width, 1), nn.Sigmoid()
        self.project = nn.Conv2d(2 * width, width, 1)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.silu(self.stem(x))
        y = self.silu2(self.depthwise(self.silu1(self.expand(x))))
        y = y * self.sigmoid(self.gate(self.squeeze(y)))
        x = x + self.project(y)
        return cast(Tensor, self.fc(self.pool(x).flatten(1)))


def narrow(num_classes: int = 10) -> Gated:
    """Returns a net with the same names and half the width."""
    return Gated(num_classes, width=8)
