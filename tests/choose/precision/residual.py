"""A small net of convs, Linears, a sum and operators between them, and modules that leave some operators float."""

from __future__ import annotations

import itertools
from typing import cast

import torch
from torch import Tensor, nn

from qatkit.config.schema import OverrideConfig
from qatkit.train.module import QATModule


class Residual(nn.Module):
    """A stem with a pool, a residual block, a transformer-like block and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.pool = nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.up, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        x = torch.relu(x + self.conv2(torch.relu(self.conv1(x))))
        x = x.flatten(2).transpose(1, 2).mean(1)
        return cast(Tensor, self.head(nn.functional.gelu(self.up(self.norm(x)))))


EXAMPLE = torch.randn(2, 3, 12, 12)
OPERATORS = ("stem", "conv1", "conv2", "up", "head")


def of(floats: tuple[str, ...]) -> QATModule:
    return QATModule(Residual(), EXAMPLE, overrides={one: OverrideConfig(float=True) for one in floats})


def subsets(least: int = 0) -> list[tuple[str, ...]]:
    return [one for n in range(least, 5) for one in itertools.combinations(OPERATORS, n)]
