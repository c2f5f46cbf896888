"""Tests of `x[index] = value` for every kind of index and value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from captures import Of, noise_of, same
from torch import Tensor

from qatkit.graph.trace import trace
from qatkit_verify.errors import ConfigError

INDICES: dict[str, Any] = {
    "integer": (slice(None), 1),
    "negative integer": (slice(None), -1, 2),
    "slice": (slice(None), slice(1, 3)),
    "slice to a negative end": (slice(None), slice(None, -1), slice(-3, -1)),
    "slice beyond the end": (slice(None), slice(1, 100)),
    "empty slice": (slice(None), slice(2, 2)),
    "everything": slice(None),
    "ellipsis": (Ellipsis, 0),
    "ellipsis alone": Ellipsis,
    "ellipsis between": (slice(None), Ellipsis, slice(0, 2)),
    "step": (slice(None), slice(None), slice(None, None, 2)),
    "step from one": (slice(None), slice(None), slice(1, None, 2), slice(2, 5)),
    "two steps": (slice(None), slice(None), slice(0, None, 2), slice(1, None, 2)),
    "step before an integer": (slice(None), slice(0, 3, 2), 1),
    "integers around a slice": (slice(None), 0, slice(1, 3), 2),
    "new axis": (slice(None), None, 1),
    "new axis at the front": (None, slice(None), slice(0, 1)),
    "list": (slice(None), [0, 2]),
    "list behind": (slice(None), slice(None), slice(None), [4, 1]),
    "list of booleans": (slice(None), [True, False, True]),
    "list and integer": (slice(None), [0, 2], 1),
    "tensor": (slice(None), torch.tensor([2, 0])),
    "boolean tensor": (slice(None), torch.tensor([False, True, True])),
    "numpy integer": (slice(None), np.int64(1)),
    "scalar tensor": (slice(None), torch.tensor(1)),
}


@pytest.mark.parametrize("value", ["number", "tensor", "broadcast", "row", "own", "integers"])
@pytest.mark.parametrize("name", INDICES)
def test_assignments_are_followed(name: str, value: str) -> None:
    index = INDICES[name]
    if value == "integers" and any(
        isinstance(part, (list, Tensor)) and part is not INDICES["scalar tensor"][1]
        for part in (index if isinstance(index, tuple) else ())
    ):
        pytest.skip("torch itself wants the same type here")

    def function(x: Any) -> Any:
        part = x[index]
        values = {
            "number": 0.5,
            "tensor": part * 2,
            "broadcast": part.mean(),
            "row": part.mean(-1, keepdim=True),
            "own": part,
            "integers": torch.ones(part.shape, dtype=torch.int64),
        }
        x[index] = values[value]
        return x

    same(Of(function), noise_of(2, 3, 4, 6), sizes=(3,))


def mask(x: Any) -> Any:
    x[x > 0] = 0.25
    x[(x < -1) & (x > -2)] = -1
    return x


def mask_of_rows(x: Any) -> Any:
    x[x.mean((1, 2, 3)) > 0] = 0.25
    return x


def mask_of_positions(x: Any) -> Any:
    x[..., torch.ones(6, 6).tril()[2].bool()] = float("-inf")
    return x.softmax(-1)


def mask_that_is_known(x: Any) -> Any:
    keep = torch.tensor([True, False, True])
    return x[:, keep] * x[:, [0, 1]].mean() + x[:, np.array([True, True, False])]


def pairs_of_indices(x: Any) -> Any:
    y = torch.zeros(x.shape[0], 6, 6)
    i, j = torch.triu_indices(6, 6)
    y[:, i, j] = 1.0
    z = torch.zeros(6, 6)
    z[i, j] = torch.arange(21.0)
    return x + y.mean() + z[:1]


def augmented(x: Any) -> Any:
    x[:, [0, 2]] += 1
    x[:, torch.tensor([1])] *= x[:, :1]
    return x


def own_indices(x: Any) -> Any:
    best = x[0, 0].argmax(-1)
    y = torch.zeros(4, 6)
    y[torch.arange(4), best] = 1.0
    return x + y


def into_a_wider_type(x: Any) -> Any:
    y = torch.zeros(x.shape, dtype=torch.float64)
    y[:, 1:] = x[:, 1:]
    y[:, 0] = x[:, 0] > 0
    return x + y.float()


def causal(x: Any) -> Any:
    scores = x @ x.mT
    scores[:, :, torch.triu(torch.ones(4, 4), 1).bool()] = -1e9
    return scores.softmax(-1) @ x


def windows(x: Any) -> Any:
    """Adds Swin's mask of shifted windows."""
    image, count = torch.zeros(1, 4, 6, 1), 0
    for h in (slice(0, -2), slice(-2, -1), slice(-1, None)):
        for w in (slice(0, -3), slice(-3, -1), slice(-1, None)):
            image[:, h, w, :] = count
            count += 1
    parts = image.view(1, 2, 2, 2, 3, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 6)
    differ = parts.unsqueeze(1) - parts.unsqueeze(2)
    differ = differ.masked_fill(differ != 0, -100.0).masked_fill(differ == 0, 0.0)
    return x + differ[0, :4]


FUNCTIONS = [
    mask,
    mask_of_rows,
    mask_of_positions,
    mask_that_is_known,
    pairs_of_indices,
    augmented,
    own_indices,
    into_a_wider_type,
    causal,
    windows,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_masks_and_indices_are_followed(function: Any) -> None:
    same(Of(function), noise_of(2, 3, 4, 6))


def test_values_counted_by_a_mask_are_refused() -> None:
    def function(x: Any) -> Any:
        x[x > 0] = x[x > 0].sort()[0]
        return x

    with pytest.raises(
        ConfigError, match=r"test_assignment\.py:\d+ `x\[x > 0\] = x\[x > 0\]\.sort\(\)\[0\]`.*values"
    ):
        trace(Of(function), noise_of(2, 3, 4, 6))
