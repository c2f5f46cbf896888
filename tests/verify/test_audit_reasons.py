"""Checks that the audit reports no problem in models with float operators for good reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from chain import noise, run_ort, run_torch, ship
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.quant.backends import FBGEMM
from qatkit.verify.audit import audit


class Of(nn.Module):
    """A model with a convolution, followed by a function that may use a norm and Linears."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.one, self.two = (
            nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8),
        )  # fmt: skip
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.conv(x))


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def there_and_back(m: Any, x: Tensor) -> Any:
    """Applies a norm between two Transposes, which ONNX Runtime's optimizer cancels."""
    x = m.norm(tokens(x)).transpose(1, 2).unflatten(2, (6, 6))
    return m.one(m.norm(tokens(x)))


def mixed_tokens(m: Any, x: Tensor) -> Any:
    """Applies a norm after an Identity, and one after a sum with a transposed branch."""
    x = F.dropout(tokens(x)[:, :8], 0.1, m.training)
    x = x + m.one(m.norm(x).transpose(1, 2)).transpose(1, 2)
    return m.two(nn.functional.layer_norm(x, (8,), m.norm.weight, m.norm.bias))


def without_parameters(m: Any, x: Tensor) -> Any:
    return m.one(F.layer_norm(m.two(x.mean((2, 3))), (8,)))


def by_hand(m: Any, x: Tensor) -> Any:
    x = m.one(x.mean((2, 3)))
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return m.two(m.norm.weight * (x - mean) / torch.sqrt(variance + 1e-5) + m.norm.bias)


def two_of_one(m: Any, x: Tensor) -> Any:
    x = m.one(x.mean((2, 3)))
    return m.two(F.layer_norm(x, (8,), m.norm.weight)) + m.two(F.layer_norm(x, (8,), m.norm.bias + 1))


def padded_with_ones(m: Any, x: Tensor) -> Any:
    return m.one(F.max_pool2d(F.pad(F.relu(x), (1, 1, 1, 1), value=1.0), 2).mean((2, 3)))


def with_coordinates(m: Any, x: Tensor) -> Any:
    line = torch.linspace(-1, 1, 6).expand(len(x), 2, 6, 6)
    return m.one(torch.cat([F.relu(x)[:, :6], line], 1).amax((2, 3)))


def read_twice(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a Linear's result as an output, which is also quantized for the next Linear."""
    mean = m.one(x.mean((2, 3)))
    return mean, m.two(mean)


def with_places(m: Any, x: Tensor) -> Any:
    x, places = F.max_pool2d(F.relu(x), 2, return_indices=True)
    return m.one(F.max_unpool2d(x * 0.5, places, [2, 2]).mean((2, 3)))


def parts_that_differ(m: Any, x: Tensor) -> Any:
    gate, value = F.relu(x).chunk(2, 1)
    return m.one(torch.cat([gate.sigmoid() * value, value], 1).mean((2, 3)))


@pytest.mark.parametrize(
    "function",
    [there_and_back, mixed_tokens, without_parameters, by_hand, two_of_one, padded_with_ones, with_coordinates,
     read_twice, with_places, parts_that_differ],
)  # fmt: skip
def test_float_for_good_reasons_is_no_problem(function: Any) -> None:
    found = ship(Of(function).eval(), noise(8, 3, 6, 6), function.__name__)
    result = audit(found.path, options=FBGEMM.session_options)
    assert not result.problems
    if function is not read_twice:
        found_by_file, expected = (
            run_ort(found.path, found.images),
            run_torch(found.conversion.graph, found.images),
        )
        np.testing.assert_allclose(found_by_file, expected, rtol=0.02, atol=0.1)
    else:
        assert {n.precision for n in result.nodes if n.op in ("Gemm", "QGemm")} == {"int8"}
