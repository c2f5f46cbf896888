"""Tests of scales rounded to the types in which files store them (float16, uint8), against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from qatkit.quant.held_scales import decoded, encoded, held
from qatkit.quant.spec import QuantSpec

DTYPES = ("float32", "float16", "uint8")


def scales(*shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return torch.exp(2 * drawn - 6)


@pytest.mark.parametrize("shape", [(64, 18), (64, 1), (64,), ()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_held_stays_as_it_is(dtype: str, shape: tuple[int, ...]) -> None:
    spec = QuantSpec("int8", scale_dtype=dtype)
    once = held(scales(*shape), spec)
    assert once.shape == shape and once.dtype == torch.float32 and bool((once > 0).all())
    assert torch.equal(held(once, spec), once)
    assert torch.equal(decoded(*encoded(once, dtype)), once)


def test_float16_is_the_nearest_half() -> None:
    given = scales(64, 18)
    np.testing.assert_array_equal(
        held(given, QuantSpec("int8", scale_dtype="float16")).numpy(), given.numpy().astype(np.float16)
    )


def test_no_scale_becomes_zero_or_infinite_as_a_half() -> None:
    found = held(torch.tensor([1e-12, 1e9]), QuantSpec("int8", scale_dtype="float16"))
    np.testing.assert_array_equal(found.numpy(), np.array([2.0**-24, 65504], np.float32))


def test_uint8_scales_are_within_half_a_unit_of_their_row() -> None:
    given = scales(64, 18)
    found = held(given, QuantSpec("int8", scale_dtype="uint8")).double().numpy()
    unit = given.double().amax(1, keepdim=True).numpy() / 255
    assert np.all(np.abs(found - np.maximum(given.double().numpy(), unit)) <= 0.5001 * unit)


def test_codes_times_units_are_exact_in_float32() -> None:
    codes, unit = encoded(scales(64, 18), "uint8")
    assert unit is not None and codes.dtype == torch.uint8 and unit.shape == (64, 1)
    exact = codes.double() * unit.double()
    assert torch.equal(decoded(codes, unit).double(), exact)
