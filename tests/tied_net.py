"""A network whose embedding table is also the weight of its last layer."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """Maps token ids [N, T] to logits [N, T, 50]; small language models often share these weights, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inside = nn.Embedding(50, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(torch.relu(self.inside(self.table(x)))))
