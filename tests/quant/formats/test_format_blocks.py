"""Tests of blocks with a shared scale against a scalar reference in exact fractions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scalar_formats import BLOCKS, block, nvfp4

from qatkit.quant.formats import blocks
from qatkit.quant.formats.blocks import largest_finite, tensor_scale
from qatkit.quant.formats.table import FORMATS, Format, Scale

ONE = torch.ones(())
NAMES = [*BLOCKS, "nvfp4"]
LAST = -1


def quantized(
    x: torch.Tensor, form: Format, axis: int, of_tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return blocks.quantized(x, form, form.granularity(axis), of_tensor)


def scales(x: torch.Tensor, form: Format) -> torch.Tensor:
    found = blocks.scales(x, form, form.granularity(LAST), ONE)
    assert found is not None
    return found


def size_of(name: str) -> int:
    return FORMATS[name].block or 0


def reference(x: torch.Tensor, name: str, of_tensor: float = 1.0) -> NDArray[np.float32]:
    """Returns the rounded rows [n, inputs], computed in blocks, one value at a time."""
    found = []
    for row in x.tolist():
        parts = [row[i : i + size_of(name)] for i in range(0, len(row), size_of(name))]
        tensor = np.float32(of_tensor)
        found.append(
            [one for part in parts for one in (nvfp4(part, tensor) if name == "nvfp4" else block(part, name))]
        )
    return np.array(found, np.float32)


def same(found: torch.Tensor, expected: NDArray[np.float32]) -> None:
    """Checks that both are equal bit for bit, with all NaNs equal."""
    given, wanted = (
        np.where(np.isnan(v), np.float32(np.nan), v).view(np.uint32) for v in (found.numpy(), expected)
    )
    np.testing.assert_array_equal(given, wanted)


def rows(count: int, length: int) -> torch.Tensor:
    """Returns rows whose values differ widely in size, between rows and within each."""
    draw = torch.Generator().manual_seed(3)
    spread = torch.exp2(torch.randint(-12, 12, (count, 1), generator=draw).float())
    return (
        torch.randn(count, length, generator=draw) * spread * torch.rand(count, length, generator=draw) ** 4
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [96, 37, 5])
def test_blocks_equal_the_scalar_reference(name: str, length: int) -> None:
    x = rows(12, length)
    form = FORMATS[name]
    of_tensor = tensor_scale(largest_finite(x), form) if form.has_tensor_scale else ONE
    same(quantized(x, form, LAST, of_tensor)[0], reference(x, name, of_tensor.item()))


@pytest.mark.parametrize("name", NAMES)
def test_sizes_at_the_ends_of_float32(name: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.ones(6, size_of(name))
    x *= torch.tensor([1e-45, 2.0**-140, 2.0**-127, 2.0**-119, 2.0**100, largest])[:, None]
    x[:, ::3] *= 0.5
    same(quantized(x, FORMATS[name], LAST, ONE)[0], reference(x, name))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_zeros_stay_zeros(name: str) -> None:
    x = torch.zeros(1, 2 * size_of(name))
    x[0, size_of(name)] = 1.0
    found, _ = quantized(x, FORMATS[name], LAST, tensor_scale(x.amax(), FORMATS[name]))
    assert found[0, : size_of(name)].tolist() == [0.0] * size_of(name)
    assert found[0, size_of(name)] == pytest.approx(1.0, rel=0.05)
    nothing = torch.zeros(2, 3)
    assert torch.equal(
        quantized(nothing, FORMATS[name], LAST, tensor_scale(nothing.amax(), FORMATS[name]))[0], nothing
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_block_that_is_not_finite_is_nan_alone(name: str, value: float) -> None:
    x = rows(1, 3 * size_of(name))
    x[0, size_of(name) + 1] = value
    found, inside = quantized(x, FORMATS[name], LAST, tensor_scale(largest_finite(x), FORMATS[name]))
    parts = found.unflatten(1, (3, -1))[0]
    assert parts[1].isnan().all()
    assert parts[::2].isfinite().all()
    assert not inside.unflatten(1, (3, -1))[0, 1].any()


@pytest.mark.parametrize("name", BLOCKS)
def test_the_smallest_scale_is_that_of_e8m0(name: str) -> None:
    found = scales(torch.full((1, 4), 1e-45), FORMATS[name])
    assert found.tolist() == [[2.0**-127]]


def test_a_scale_of_nvfp4_that_rounds_to_zero_is_raised() -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 6 * 448.0, 1e-3
    found = scales(x, FORMATS["nvfp4"])
    assert found.tolist() == [[448.0, 2.0**-9]]


def test_nvfp4_saturates_beyond_the_range_it_was_given() -> None:
    x = torch.tensor([[1.0, 30.0, -30.0]])
    of_tensor = tensor_scale(torch.tensor(2.0), FORMATS["nvfp4"])
    found, inside = quantized(x, FORMATS["nvfp4"], LAST, of_tensor)
    assert found[0, 1:].tolist() == pytest.approx([2.0, -2.0], rel=1e-6)
    assert inside.tolist() == [[True, False, False]]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_lie_along_the_axis(name: str) -> None:
    x = rows(4, 40 * 6).reshape(4, 40, 2, 3)
    found, _ = quantized(x, FORMATS[name], 1, ONE)
    last = quantized(x.permute(0, 2, 3, 1).reshape(24, 40), FORMATS[name], LAST, ONE)[0]
    assert torch.equal(found, last.reshape(4, 2, 3, 40).permute(0, 3, 1, 2))


def test_mxfp4_saturates_between_6_and_8_scales() -> None:
    x = torch.tensor([[7.9, 6.0, 5.1, -7.0, 6.9]])
    found, inside = quantized(x, FORMATS["mxfp4"], LAST, ONE)
    assert found.tolist() == [[6.0, 6.0, 6.0, -6.0, 6.0]]
    assert inside.tolist() == [[False, True, True, False, True]]  # the next number would be 8


def test_bfp16_is_that_of_quarks_operator() -> None:
    # The formulas of its kernel: scale 2^(e - 6), largest value 2^(e + 1) - scale.
    x = torch.tensor([[1.999, -1.0, 0.51, 0.0078125, 0.0234375, 1e-3, 3e-5, 0.0]])
    scale, largest = 2.0**-6, 2.0 - 2.0**-6
    expected = np.clip(np.round(x.numpy() / scale) * scale, -largest, largest)
    np.testing.assert_array_equal(quantized(x, FORMATS["bfp16"], LAST, ONE)[0].numpy(), expected)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_has_one_scale_for_the_tensor(name: str) -> None:
    x, form = rows(3, 50), FORMATS[name]
    scale = tensor_scale(x.abs().amax(), form)
    dtype = getattr(torch, name)
    held = (x / scale).clamp(-form.element.maximum, form.element.maximum).to(dtype)
    assert torch.equal(quantized(x, form, LAST, scale)[0], held.float() * scale)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_floats_of_16_bits_have_no_scale(name: str) -> None:
    x = rows(3, 50)
    found, inside = quantized(x, FORMATS[name], LAST, ONE)
    assert torch.equal(found, x.to(getattr(torch, name)).float())
    assert inside.all()


def test_what_is_held_is_not_changed_again() -> None:
    for name, form in FORMATS.items():
        x = rows(6, 64)
        of_tensor = tensor_scale(x.abs().amax(), form)
        once = quantized(x, form, LAST, of_tensor)[0]
        again = quantized(once, form, LAST, of_tensor)[0]
        if form.scale is not Scale.E4M3:  # the rounded maximum changes an E4M3 block scale
            assert torch.equal(again, once), name


def test_bits_of_a_value_are_those_of_the_specifications() -> None:
    found = {name: form.bits for name, form in FORMATS.items()}
    assert found["bfp16"] == 9
    assert found["nvfp4"] == 4.5
    assert (found["mxfp4"], found["mxfp6_e2m3"], found["mxint8"]) == (4.25, 6.25, 8.25)
