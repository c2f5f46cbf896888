"""Tests of `x[mask]` with computed masks.

Selected values may be computed elementwise and written back to such a selection. What depends on their number
is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captures import Of, noise_of, same
from torch import Tensor
from torch.nn import functional as F

from qatkit.graph.trace import trace
from qatkit_verify.errors import ConfigError


def doubled(x: Tensor) -> Tensor:
    x[x > 0.5] *= 2
    return x


def two_masks_alike(x: Tensor) -> Tensor:
    x[x < 0] = -x[x < 0] * 0.5
    return x


def of_another(x: Tensor) -> Tensor:
    y, mask = x * 3 - 1, x.flip(-1) > x
    out = torch.zeros_like(x)
    out[mask] = y[mask].abs() - 0.1 * x[mask].sigmoid()
    return out


def by_rows(x: Tensor) -> Tensor:
    mask = x.mean(-1) > 0
    x[mask] = torch.tanh(x[mask]) + torch.arange(6.0)
    return x


def a_row_for_all(x: Tensor) -> Tensor:
    x[x.sum(-1) > 0] = torch.linspace(-1, 1, 6)
    return x


def changed_alone(x: Tensor) -> Tensor:
    picked = x[x > 0]
    picked.mul_(3).add_(1)
    x[x > 0] = picked
    return x


def a_function(x: Tensor) -> Tensor:
    mask = x.abs() > 1
    x[mask] = F.leaky_relu(x[mask], 0.3).clamp(-1.5, 2)
    return x


def another_type(x: Tensor) -> Tensor:
    places, other = torch.zeros_like(x, dtype=torch.long), (x * 4).long()
    places[x > 0] = other[x > 0]
    return places.float() + x


@pytest.mark.parametrize(
    "function",
    [doubled, two_masks_alike, of_another, by_rows, a_row_for_all, changed_alone, a_function, another_type],
)
def test_followed(function: Any) -> None:
    same(Of(function), noise_of(2, 3, 4, 6))


def summed(x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def elsewhere(x: Tensor) -> Tensor:
    x[x > 0.1] = (x[x > 0.1] * 2)[torch.arange(int((x > 0.1).sum()))]
    return x


def sized(x: Tensor) -> Tensor:
    return x * x[x > 0].shape[0]


def along_the_picked(x: Tensor) -> Tensor:
    mask = x > 0
    x[mask] = x[mask] * torch.arange(float(mask.sum()))
    return x


@pytest.mark.parametrize("function", [summed, elsewhere, sized, along_the_picked])
def test_what_depends_on_how_many_there_are_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"test_picked\.py:\d+ `.*values of a tensor"):
        trace(Of(function), noise_of(2, 3, 4, 6))
