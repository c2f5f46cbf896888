"""A network of one's own, with residuals and a custom block, through `train.py`.

    uv run train.py recipe=quickstart name=residual model.name=examples.residual.ScaledResNet \
      '+model.kwargs={width: 24}' model.num_classes=null schedule.float_epochs=20 schedule.lr=5e-4

`model.name` is the dotted path of anything that returns an `nn.Module`; `num_classes` is handed to it unless it
is null. The model is captured by running it, so the graph needs one thing of it: no Python branch on the values
of a tensor. Branches on sizes, loops over submodules and keyword arguments are fine.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ScaledBlock(nn.Module):
    """y = relu(x + conv(hardswish(norm(conv(x)))) · gate(x)): a residual whose branch is gated by its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.gate = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.conv2(F.hardswish(self.norm(self.conv1(x))))
        gate = torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        return F.relu(x + branch * gate)


class ScaledResNet(nn.Module):
    """Images [N, 3, H, W] to logits [N, num_classes]."""

    def __init__(self, width: int = 16, blocks: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ScaledBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x.mean((2, 3))))
