"""Models with tensors that depend only on the size of the input and on parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Positions(nn.Module):
    """A vision transformer's position embedding, resized with antialiasing to the image's grid of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.table = nn.Parameter(torch.randn(1, 16, 7, 7))
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        found = self.patches(x)
        size = found.shape[2:]
        table = F.interpolate(self.table, size=size, mode="bicubic", antialias=True, align_corners=False)
        return self.mix((found + table).flatten(2).transpose(1, 2))


class PaddedToFrames(nn.Module):
    """A codec's causal convolution, for which the padding of the last frame is computed with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv1d(1, 8, 8, stride=4), nn.Conv1d(8, 4, 3, padding=1)
        self.register_buffer("stride", torch.tensor(4), persistent=False)

    def forward(self, x: Tensor) -> Any:
        stride: Any = self.stride
        frames = torch.ceil((x.shape[-1] - stride) / stride).long()
        extra = frames * stride + stride - x.shape[-1]
        return self.last(torch.relu(self.conv(F.pad(x, (4, extra)))))
