"""Tests of element types (floats, int8) against their specifications, ml_dtypes and PyTorch's own types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scalar_formats import ELEMENTS, nearest, patterns

from qatkit.quant.formats import table
from qatkit.quant.formats.elements import rounded

ROWS = {
    "float16": table.FLOAT16,
    "bfloat16": table.BFLOAT16,
    "float8_e4m3fn": table.E4M3,
    "float8_e5m2": table.E5M2,
    "float6_e2m3fn": table.E2M3,
    "float6_e3m2fn": table.E3M2,
    "float4_e2m1fn": table.E2M1,
}
SATURATING = [name for name, row in ROWS.items() if row.saturates]
EVERY = [*ROWS, "int8"]


def of(name: str) -> table.Element:
    return table.INT8 if name == "int8" else ROWS[name]


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Returns the bits of float32 values, with all NaNs equal."""
    return np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32).view(np.uint32)


def same(found: torch.Tensor, expected: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(bits(found.numpy()), bits(expected))


def drawn(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Returns float32 values with random bits, including NaNs, infinities and denormals."""
    draw = np.random.default_rng(seed)
    found: NDArray[np.float32] = draw.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    return found


def near(name: str, count: int) -> NDArray[np.float32]:
    """Returns values in the element's range, including midpoints between neighbours."""
    row, draw = of(name), np.random.default_rng(1)
    sizes = np.exp2(draw.uniform(np.log2(row.least) - 2, np.log2(row.maximum), count // 2))
    steps = draw.integers(0, 512, count - count // 2) * (row.least / 2)
    found: NDArray[np.float32] = (np.concatenate([sizes, steps]) * draw.choice([-1, 1], count)).astype(
        np.float32
    )
    return found


@pytest.mark.parametrize("name", ROWS)
def test_rows_have_the_largest_and_smallest_numbers(name: str) -> None:
    row, spec = ROWS[name], ELEMENTS[name]
    numbers = [one for one in patterns(name) if one is not None]
    assert (row.maximum, row.least) == (spec.maximum, spec.least) == (float(numbers[-1]), float(numbers[1]))
    # Halfway to the number that would follow.
    assert row.limit == (numbers[-1] + 2 * numbers[-1] - numbers[-2]) / 2
    assert row.bits == 1 + spec.exponent + spec.mantissa
    assert 2.0**row.largest_exponent <= spec.maximum < 2.0 ** (row.largest_exponent + 1)


def test_int8_has_the_numbers_of_the_mx_specification() -> None:
    assert (table.INT8.maximum, table.INT8.least, table.INT8.bits) == (1 + 63 / 64, 1 / 64, 8)
    whole = torch.arange(-127, 128) / 64
    assert torch.equal(rounded(whole, table.INT8), whole)


@pytest.mark.parametrize("name", EVERY)
def test_elements_equal_the_scalar_reference(name: str) -> None:
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4028235e38, 2.0**-126], np.float32
    )
    x = np.concatenate([special, drawn(500), near(name, 1500)])
    same(
        rounded(torch.from_numpy(x), of(name)), np.array([nearest(float(one), name) for one in x], np.float32)
    )


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_patterns_of_16_bits_stay_themselves(name: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    held = every.view(getattr(torch, name)).float()
    same(rounded(held, ROWS[name]), held.numpy())
    # The midpoint to the next number, and its neighbours one bit away.
    half = held.view(torch.int32)[:, None] + 2 ** (22 - ROWS[name].mantissa_bits) + torch.tensor([-1, 0, 1])
    x = half.to(torch.int32).view(torch.float32)
    same(rounded(x, ROWS[name]), x.to(getattr(torch, name)).float().numpy())


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_all_patterns_of_8_bits_stay_themselves(name: str) -> None:
    held = torch.arange(256).to(torch.uint8).view(getattr(torch, name)).float()
    held = held[held.isfinite()]
    same(rounded(held, ROWS[name]), held.numpy())


@pytest.mark.parametrize("name", ROWS)
def test_a_million_draws_equal_ml_dtypes(name: str) -> None:
    x = np.concatenate([drawn(500_000), near(name, 500_000)])
    row = ROWS[name]
    within = np.clip(x, -row.maximum, row.maximum) if row.saturates else x
    with np.errstate(over="ignore", invalid="ignore"):
        expected = within.astype(np.float16 if name == "float16" else getattr(ml_dtypes, name)).astype(
            np.float32
        )
    expected = np.where(np.isnan(x), np.float32(np.nan), expected)  # formats of 6 and 4 bits have no NaN
    same(rounded(torch.from_numpy(x), row), expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_million_draws_equal_pytorch(name: str) -> None:
    x, row = torch.from_numpy(np.concatenate([drawn(500_000, 2), near(name, 500_000)])), ROWS[name]
    within = x.clamp(-row.maximum, row.maximum) if row.saturates else x
    same(rounded(x, row), within.to(getattr(torch, name)).float().numpy())


@pytest.mark.parametrize("name", [*SATURATING, "int8"])
def test_what_is_beyond_saturates(name: str) -> None:
    row = of(name)
    x = torch.tensor([row.maximum * 1.01, row.maximum * 4, torch.inf, -torch.inf])
    assert rounded(x, row).tolist() == [row.maximum, row.maximum, row.maximum, -row.maximum]


def test_negative_zero_is_kept_but_by_integers() -> None:
    x = torch.tensor([-0.0, -1e-30])
    assert rounded(x, table.E2M1).signbit().all()
    assert not rounded(x, table.INT8).signbit().any()


def test_no_gradient_and_no_change_of_the_input() -> None:
    x = torch.tensor([0.3, 5.0], requires_grad=True)
    assert not rounded(x, table.E2M1).requires_grad
    assert x.tolist() == pytest.approx([0.3, 5.0])
