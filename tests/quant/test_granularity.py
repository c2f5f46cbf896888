"""Tests of which scale applies to which element, against NumPy loops over the indices."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chain import noise
from numpy.typing import NDArray

from qatkit.quant import numerics
from qatkit.quant.backends import FBGEMM
from qatkit.quant.granularity import (
    BLOCK_SIZES,
    GRANULARITIES,
    AlongAxis,
    Granularity,
    PerBlock,
    PerChannel,
    PerTensor,
    granularity_of,
)
from qatkit.quant.spec import DTYPES, Kind, QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize
from qatkit_verify.errors import ConfigError

CASES: list[tuple[Granularity, tuple[int, ...], tuple[int, ...]]] = [
    (PerTensor(), (4, 6), ()),
    (PerTensor(), (5, 3, 2, 2), ()),
    (PerChannel(0), (4, 6), (4,)),
    (PerChannel(1), (5, 3, 2, 2), (3,)),
    (PerChannel(-1), (5, 3, 7), (7,)),
    (PerBlock(3), (4, 6), (4, 2)),
    (PerBlock(4), (5, 6), (5, 2)),  # the last block has two elements
    (PerBlock(8), (4, 5, 2, 2), (4, 3)),  # a Conv weight in blocks of input channels times kernel
    (PerBlock(16), (6, 1, 3, 3), (6, 1)),
    (PerBlock(8), (3, 5), (3, 1)),
    (AlongAxis(4, 1), (5, 6), (5, 2)),
    (AlongAxis(2, 1), (4, 5, 2, 3), (4, 3, 2, 3)),  # a Conv weight in blocks of input channels
    (AlongAxis(4, -1), (3, 2, 8), (3, 2, 2)),
]


def index_of_scale(
    granularity: Granularity, place: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the index of an element's scale as the ONNX standard defines it.

    `PerBlock` counts blocks in the weight as a matrix [out, inputs], `AlongAxis` along one axis.
    """
    if isinstance(granularity, PerChannel):
        return (place[granularity.axis],)
    if isinstance(granularity, AlongAxis):
        at = granularity.axis % len(shape)
        return tuple(i // granularity.size if axis == at else i for axis, i in enumerate(place))
    if isinstance(granularity, PerBlock):
        return place[0], int(np.ravel_multi_index(place[1:], shape[1:])) // granularity.size
    return ()


def by_element(
    granularity: Granularity, scale: NDArray[np.float32], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    found = np.empty(shape, np.float32)
    for place in np.ndindex(shape):
        found[place] = scale[index_of_scale(granularity, place, shape)]
    return found


def largest_by_scale(
    granularity: Granularity, weight: NDArray[np.float32], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    found = np.zeros(shape, np.float32)
    for place in np.ndindex(weight.shape):
        at = index_of_scale(granularity, place, weight.shape)
        found[at] = max(found[at], abs(weight[place]))
    return found


@pytest.mark.parametrize(("granularity", "shape", "scales"), CASES, ids=str)
def test_every_element_has_the_scale_that_onnx_gives_it(
    granularity: Granularity, shape: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    assert granularity.scale_shape(shape) == scales
    scale = torch.rand(scales, generator=torch.Generator().manual_seed(0))
    spread = granularity.spread(scale, shape).expand(shape)
    np.testing.assert_array_equal(spread, by_element(granularity, scale.numpy(), shape))
    values, dims = granularity.grouped(noise(*shape).abs())
    np.testing.assert_array_equal(
        values.amax(dims), largest_by_scale(granularity, noise(*shape).numpy(), scales)
    )


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(("granularity", "shape", "scales"), CASES, ids=str)
def test_a_weight_is_quantized_and_dequantized_as_numpy_does(
    granularity: Granularity, shape: tuple[int, ...], scales: tuple[int, ...], dtype: str
) -> None:
    spec = QuantSpec(dtype, symmetric=True, granularity=granularity)
    weight, high = noise(*shape), {"int8": 127, "int4": 7}[dtype]
    scale = largest_by_scale(granularity, weight.numpy(), scales) / np.full(scales, high, np.float32)
    np.testing.assert_allclose(numerics.weight_scale(weight, spec), scale, rtol=1e-6)
    spread = by_element(granularity, numerics.weight_scale(weight, spec).numpy(), shape)
    whole = np.clip(np.round(weight.numpy() / spread), -high, high)
    found = numerics.fake_quantize_weight(weight, torch.from_numpy(np.asarray(scale)), spec)
    np.testing.assert_allclose(found, whole * spread, rtol=1e-6)
    quantizer = WeightFakeQuantize(spec, shape)
    quantizer.enabled = True
    np.testing.assert_array_equal(quantizer.whole(weight), whole)
    np.testing.assert_array_equal(quantizer(weight)[0], whole * spread)
    shipped = quantizer.integers(weight, None, torch.ones(()))
    assert shipped.scale.shape == scales
    np.testing.assert_array_equal(shipped.weight, whole)


def test_each_block_is_clipped_for_its_own_least_error() -> None:
    """The search must clip only the block with an outlier; the other 2-bit block keeps its range."""
    spec = QuantSpec("int2", symmetric=True, granularity=PerBlock(50))
    weight = noise(1, 100).clamp(-1.5, 1.5)
    weight[0, :50] = weight[0, :50].sign()
    weight[0, 99] = 2.5
    shares = np.linspace(1.0, 0.4, 31)
    wanted = []
    for block in np.split(weight.double().numpy()[0], 2):
        steps = [np.abs(block).max() * share for share in shares]
        errors = [((np.clip(np.round(block / s), -1, 1) * s - block) ** 2).sum() for s in steps]
        wanted.append(shares[int(np.argmin(errors))])
    assert wanted[0] == 1.0 > wanted[1]
    np.testing.assert_allclose(numerics.mse_clip(weight, spec), [wanted], rtol=1e-6)


def test_what_a_scale_may_be_multiplied_by() -> None:
    """A factor per output channel can be merged into scales of which none applies to two output channels."""
    assert not PerTensor().separates(0)
    assert PerChannel(0).separates(0) and not PerChannel(1).separates(0)
    assert PerBlock(32).separates(0) and not PerBlock(32).separates(1)


def test_configurations_name_all_three_of_them() -> None:
    assert GRANULARITIES == ("per_tensor", "per_channel")
    assert [granularity_of(text) for text in GRANULARITIES] == [PerTensor(), PerChannel(0)]
    assert [granularity_of({"block": size}) for size in BLOCK_SIZES] == [PerBlock(n) for n in BLOCK_SIZES]


@pytest.mark.parametrize("asked", ["per_moon", "block", 32, {"block": 24}, {"blocks": 32}, {"block": "32"}])
def test_other_granularities_are_refused(asked: Any) -> None:
    expected = r"expected one of per_tensor, per_channel, {block: 16 \| 32 \| 64 \| 128 \| 256}"
    with pytest.raises(ValueError, match=rf"granularity={re.escape(str(asked))}: {expected}"):
        granularity_of(asked)


def test_a_block_without_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="size=0: expected 1 or more elements"):
        PerBlock(0)


def test_a_backend_refuses_scales_that_no_file_of_ours_has() -> None:
    blocks = replace(FBGEMM.weight, granularity=PerBlock(32))
    line = r"backend=fbgemm: weight\.granularity={block: 32}: expected per_tensor or per_channel"
    with pytest.raises(ConfigError, match=line):
        replace(FBGEMM, weight=blocks)
    channels = replace(FBGEMM.activation, granularity=PerChannel(1))
    with pytest.raises(
        ConfigError, match=r"activation\.granularity=per_channel\(axis=1\): expected per_tensor"
    ):
        replace(FBGEMM, activation=channels)


def test_a_bias_beside_blocks_is_refused() -> None:
    quantizer = WeightFakeQuantize(QuantSpec("int8", symmetric=True, granularity=PerBlock(2)), (3, 4))
    with pytest.raises(ValueError, match=r"granularity={block: 2}: expected per_tensor or per_channel"):
        quantizer.integers(noise(3, 4), noise(3), torch.ones(()))


def test_the_rows_of_the_number_types_say_what_they_are() -> None:
    assert {row.kind for row in DTYPES.values()} == {Kind.INTEGER}
    assert [name for name, row in DTYPES.items() if row.signed] == ["int8", "int4", "int3", "int2", "int16"]
    for name, row in DTYPES.items():
        info = torch.iinfo(getattr(torch, row.storage))
        assert info.min <= row.low and row.high <= info.max
        bits = int(name.removeprefix("u").removeprefix("int"))
        ends = (0, 2**bits - 1) if name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        assert (row.low, row.high) == ends
