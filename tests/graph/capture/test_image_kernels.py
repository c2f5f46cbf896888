"""Tests of grouped convolutions that give each image of a batch its own kernel: any batch size works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captures import Calls, noise_of, same
from torch import Tensor, nn
from torch.nn import functional as F


def modulated(m: Any, x: Tensor, style: Tensor, bias: bool = False, **options: Any) -> Tensor:
    batch, channels = x.shape[:2]
    weight = (m.weight * m.style(style).view(batch, 1, channels, 1, 1)).flatten(0, 1)
    added = m.style(style).sum(-1, keepdim=True).expand(-1, 5).reshape(-1) if bias else None
    x = x.reshape(1, batch * channels, *x.shape[2:])
    y = F.conv2d(x, weight, added, groups=batch, **options)
    return y.view(batch, 5, *y.shape[2:])


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "padded": (lambda m, x, s: modulated(m, x, s, padding=1), (3, 3)),
    "bias, stride": (lambda m, x, s: modulated(m, x, s, bias=True, stride=2, padding=(1, 0)), (3, 3)),
    "same, dilated": (lambda m, x, s: modulated(m, x, s, padding="same", dilation=2), (3, 2)),
    "valid": (lambda m, x, s: modulated(m, x, s, padding="valid"), (2, 3)),
    "of one pixel": (modulated, (1, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_modulated(name: str) -> None:
    torch.manual_seed(0)
    forward, kernel = CASES[name]
    model = Calls(forward, style=nn.Linear(6, 4), weight=nn.Parameter(torch.randn(1, 5, 4, *kernel) * 0.3))
    graph = same(model, (noise_of(2, 4, 6, 7), noise_of(2, 6, seed=1)), tolerance=1e-5)
    assert F.conv2d not in {node.target for node in graph.graph.nodes}


def test_transposed() -> None:
    def forward(m: Any, x: Tensor, style: Tensor) -> Tensor:
        batch = len(x)
        weight = (m.weight * m.style(style).view(batch, 4, 1, 1, 1)).flatten(0, 1)
        y = F.conv_transpose2d(x.reshape(1, -1, 5, 5), weight, stride=2, padding=1, groups=batch)
        return y.view(batch, 3, *y.shape[2:])

    torch.manual_seed(0)
    model = Calls(forward, style=nn.Linear(6, 4), weight=nn.Parameter(torch.randn(1, 4, 3, 4, 4) * 0.3))
    same(model, (noise_of(2, 4, 5, 5), noise_of(2, 6, seed=1)), tolerance=1e-5)


def test_correlations_of_two_images() -> None:
    def forward(m: Any, search: Tensor, template: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, z = m.conv(search), m.conv(template)
        batch, channels = x.shape[:2]
        wide = x.reshape(1, -1, *x.shape[2:])
        whole = F.conv2d(wide, z, groups=batch)
        each = F.conv2d(wide, z.flatten(0, 1).unsqueeze(1), groups=batch * channels)
        lines = F.conv1d(wide[..., 0], z[..., 0].flatten(0, 1).unsqueeze(1), groups=batch * channels)
        return (
            whole.transpose(0, 1),
            each.view(batch, channels, *each.shape[2:]),
            lines.view(batch, channels, -1),
        )

    torch.manual_seed(0)
    same(
        Calls(forward, conv=nn.Conv2d(3, 4, 3)), (noise_of(2, 3, 8, 8), noise_of(2, 3, 5, 5)), tolerance=1e-5
    )
