"""A network that covers every way of packing weights."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class Mixed(nn.Module):
    """A 3x3 and a depthwise convolution, and Linears of widths that no block size divides; two layers have a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 20, 3, padding=1)
        self.depthwise = nn.Conv2d(20, 20, 3, groups=20, bias=False)
        self.linear, self.last = nn.Linear(100, 72), nn.Linear(72, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(torch.relu(self.conv(x)))
        rows = x.flatten(2).transpose(1, 2).reshape(x.shape[0], -1, 100)
        return cast(Tensor, self.last(torch.relu(self.linear(rows))))
