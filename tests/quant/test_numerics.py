"""Tests of the arithmetic against ONNX's reference implementation, and of ranges against their definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from torch.testing import assert_close

from qatkit.quant import numerics
from qatkit.quant.granularity import PerChannel, granularity_of
from qatkit.quant.spec import QuantSpec

TYPES: dict[str, tuple[Any, torch.dtype]] = {"uint8": (np.uint8, torch.uint8), "int8": (np.int8, torch.int8)}
SCALE, ZERO = 0.25, {"uint8": 120, "int8": -7}


def onnx_run(
    op: str, x: NDArray[Any], scale: NDArray[Any], zero_point: NDArray[Any], axis: int
) -> NDArray[Any]:
    """Returns the result of a QuantizeLinear (opset 13) or DequantizeLinear in onnx.reference.

    The oldest DequantizeLinear there is that of opset 19, equal to opset 13's for 8-bit inputs and float32 scales.
    """
    elements = [helper.np_dtype_to_tensor_dtype(a.dtype) for a in (x, scale, zero_point)]
    infos = [
        helper.make_tensor_value_info(n, e, a.shape)
        for n, e, a in zip("xsz", elements, (x, scale, zero_point), strict=True)
    ]
    result = TensorProto.FLOAT if op == "DequantizeLinear" else elements[2]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "s", "z"], ["y"], axis=axis)],
        op,
        infos,
        [helper.make_tensor_value_info("y", result, x.shape)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13 if op == "QuantizeLinear" else 19)]
    )
    onnx.checker.check_model(model)
    results: Any = ReferenceEvaluator(model).run(None, {"x": x, "s": scale, "z": zero_point})
    return cast("NDArray[Any]", results[0])


def awkward(scale: float) -> Tensor:
    """Returns ties between all integers, values far outside the range, signed zeros, and ordinary numbers."""
    ties = (torch.arange(-400, 400) + 0.5) * scale
    rest = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 60 * scale
    return torch.cat([ties, rest, torch.tensor([0.0, -0.0, 1e7 * scale, -1e7 * scale, 1e-30])])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [0.25, 0.037, 3.1e-5])
def test_quantize_is_onnx_quantize_linear(dtype: str, scale: float) -> None:
    np_type, torch_type = TYPES[dtype]
    x, zero = awkward(scale), ZERO[dtype]
    expected = onnx_run("QuantizeLinear", x.numpy(), np.array(scale, np.float32), np.array(zero, np_type), 1)
    got = numerics.quantize(x, torch.tensor(scale), torch.tensor(zero, dtype=torch_type))
    assert got.dtype == torch_type
    assert np.array_equal(got.numpy(), expected)
    info = np.iinfo(np_type)
    assert {info.min, info.max} <= set(expected.tolist())  # saturates on both sides


def test_halves_round_to_even() -> None:
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    got = numerics.quantize(x, torch.tensor(1.0), torch.tensor(0, dtype=torch.int8))
    assert got.tolist() == [-2, -2, 0, 0, 2, 2]


@pytest.mark.parametrize("dtype", TYPES)
def test_dequantize_is_onnx_dequantize_linear(dtype: str) -> None:
    np_type, torch_type = TYPES[dtype]
    info = np.iinfo(np_type)
    q = np.arange(info.min, info.max + 1, dtype=np_type)
    zero, scale = np.array(ZERO[dtype], np_type), np.array(0.037, np.float32)
    got = numerics.dequantize(
        torch.from_numpy(q), torch.tensor(0.037), torch.tensor(int(zero), dtype=torch_type), 1
    )
    assert np.array_equal(got.numpy(), onnx_run("DequantizeLinear", q, scale, zero, 1))


@pytest.mark.parametrize("axis", [0, 1])
def test_dequantize_per_channel_is_onnx_dequantize_linear(axis: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.integers(-128, 128, (6, 6, 3), dtype=np.int8)
    scale, zero = rng.uniform(1e-4, 1, 6).astype(np.float32), rng.integers(-9, 9, 6, dtype=np.int8)
    got = numerics.dequantize(torch.from_numpy(q), torch.from_numpy(scale), torch.from_numpy(zero), axis)
    assert np.array_equal(got.numpy(), onnx_run("DequantizeLinear", q, scale, zero, axis))


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_weight_fake_quantization_is_onnx_on_axis_0(granularity: str) -> None:
    spec = QuantSpec("int8", symmetric=True, granularity=granularity_of(granularity))
    w = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 2, 5).view(
        -1, 1, 1, 1
    )
    w[1] = 0.0  # a dead channel
    scale = numerics.weight_scale(w, spec)
    largest = w.abs().amax(dim=(1, 2, 3)) if granularity == "per_channel" else w.abs().max()
    np.testing.assert_allclose(scale.numpy(), np.maximum(largest.numpy() / 127, 1e-12), rtol=1e-6)
    zero = np.zeros(scale.shape, np.int8)
    q = onnx_run("QuantizeLinear", w.numpy(), scale.numpy(), zero, 0)
    expected = onnx_run("DequantizeLinear", q, scale.numpy(), zero, 0)
    assert np.array_equal(numerics.fake_quantize_weight(w, scale, spec).numpy(), expected)
    assert q.min() >= -127


def test_weight_gradient_is_the_identity() -> None:
    spec = QuantSpec("int8", symmetric=True, granularity=PerChannel(0))
    w = torch.randn(4, 3, requires_grad=True)
    upstream = torch.randn(4, 3)
    numerics.fake_quantize_weight(w, numerics.weight_scale(w, spec), spec).backward(upstream)
    assert w.grad is not None
    assert torch.equal(w.grad, upstream)


RANGES = {
    "ordinary": (-1.3, 2.7),
    "all negative": (-5.0, -2.0),
    "all positive": (3.0, 7.5),
    "zero width": (0.0, 0.0),
    "a point": (4.2, 4.2),
    "lopsided": (-1e-6, 1e3),
    "half way": (-0.5, 254.5),
    "huge": (-1e37, 1e38),
    "as far as floats go": (-3.4e38, 3.4e38),
    "denormal": (-1e-40, 1e-41),
    "tiny": (-1e-9, 3e-9),
}
SPECS = [
    QuantSpec(d, symmetric=s, reduce_range=r) for d in TYPES for s in (False, True) for r in (False, True)
]


@pytest.mark.parametrize("ends", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.dtype}-sym{s.symmetric:d}-reduced{s.reduce_range:d}"
)
def test_choose_qparams_covers_the_range_and_zero(ends: tuple[float, float], spec: QuantSpec) -> None:
    scale, zero_point = numerics.choose_qparams(torch.tensor(ends[0]), torch.tensor(ends[1]), spec)
    assert scale.dtype == torch.float32 and zero_point.dtype == torch.int32
    s, z = np.float64(scale.item()), int(zero_point)
    assert np.isfinite(s) and s >= 1e-12 * (1 - 1e-6)
    assert spec.quant_min <= z <= spec.quant_max  # zero is exactly representable
    low, high = min(ends[0], 0.0), max(ends[1], 0.0)
    bottom, top = (spec.quant_min - z) * s, (spec.quant_max - z) * s
    half = s / 2 * (1 + 1e-4)
    assert bottom <= low + half and top >= high - half
    if spec.symmetric:
        assert z == {"uint8": 64 if spec.reduce_range else 128, "int8": 0}[spec.dtype]
        assert s == pytest.approx(
            max(-low, high, 1e-12 * (spec.quant_max - z)) / (spec.quant_max - z), rel=1e-6
        )
    else:
        levels = spec.quant_max - spec.quant_min
        assert s == pytest.approx(max((high - low) / levels, 1e-12), rel=1e-6)
        assert abs(z - (spec.quant_min - low / s)) <= 0.5001
        if s > 1.01e-12:
            assert abs(bottom - low) <= half and abs(top - high) <= half


def test_the_ranges_of_the_types() -> None:
    ends = {(s.dtype, s.symmetric, s.reduce_range): (s.quant_min, s.quant_max) for s in SPECS}
    assert ends == {
        ("uint8", False, False): (0, 255),
        ("uint8", True, False): (0, 255),
        ("uint8", False, True): (0, 127),
        ("uint8", True, True): (0, 127),
        ("int8", False, False): (-128, 127),
        ("int8", True, False): (-127, 127),
        ("int8", False, True): (-64, 63),
        ("int8", True, True): (-63, 63),
    }


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [SCALE, 0.037, 1.7e-5])
def test_fake_quantize_is_quantize_then_dequantize_bit_for_bit(dtype: str, scale: float) -> None:
    np_type = TYPES[dtype][0]
    x, s = awkward(scale), np.array(scale, np.float32)
    zero = np.array(ZERO[dtype], np_type)
    expected = onnx_run("DequantizeLinear", onnx_run("QuantizeLinear", x.numpy(), s, zero, 1), s, zero, 1)
    got = numerics.fake_quantize(
        x, torch.tensor(scale), torch.tensor(ZERO[dtype], dtype=torch.int32), QuantSpec(dtype)
    )
    assert np.array_equal(got.numpy(), expected)


def gradient(x: Tensor, scale: float, zero_point: int, spec: QuantSpec) -> Tensor:
    x = x.clone().requires_grad_()
    numerics.fake_quantize(
        x, torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), spec
    ).sum().backward()
    assert x.grad is not None
    return x.grad


def test_gradient_is_one_inside_the_range_and_zero_outside() -> None:
    low, high = (-128 + 7) * SCALE, (127 + 7) * SCALE
    inside = torch.linspace(low + 1e-3, high - 1e-3, 999)
    outside = torch.tensor([low - 1e-3, low - 100, high + 1e-3, high + 1e9])
    assert torch.equal(gradient(inside, SCALE, -7, QuantSpec("int8")), torch.ones(999))
    assert torch.equal(gradient(outside, SCALE, -7, QuantSpec("int8")), torch.zeros(4))


def test_gradient_of_a_range_from_zero_is_that_of_relu() -> None:
    x = torch.tensor([-3.0, -1e-20, -0.0, 0.0, 1e-20, 0.01, 2.0, 5.0])
    reference = x.clone().requires_grad_()
    torch.relu(reference).sum().backward()
    assert reference.grad is not None
    assert torch.equal(gradient(x, 0.1, 0, QuantSpec("uint8")), reference.grad)


@pytest.mark.parametrize(("dtype", "zero_point"), [("uint8", 0), ("uint8", 120), ("int8", -7)])
def test_accelerators_round_and_differentiate_as_the_cpu(dtype: str, zero_point: int) -> None:
    """Includes half a step outside the range, where the gradient of the fused kernel itself is 1."""
    spec, scale, zero = QuantSpec(dtype), torch.tensor(SCALE), torch.tensor(zero_point, dtype=torch.int32)
    low, high = ((end - zero_point) * SCALE for end in spec.type_range)
    x = torch.linspace(low - 2 * SCALE, high + 2 * SCALE, 4001).requires_grad_()
    fused = numerics._FakeQuantizeOnDevice.apply(x, scale, zero, *spec.type_range)  # type: ignore[no-untyped-call]
    fused.sum().backward()
    assert torch.equal(cast(Tensor, x.grad), gradient(x.detach(), SCALE, zero_point, spec))
    assert_close(fused, numerics.fake_quantize(x.detach(), scale, zero, spec), atol=1e-6, rtol=0)


def test_bfloat16_is_quantized_in_float32() -> None:
    x = torch.randn(500).bfloat16()
    scale, zero = torch.tensor(0.037), torch.tensor(120, dtype=torch.int32)
    got = numerics.fake_quantize(x, scale, zero, QuantSpec("uint8"))
    levels = torch.round(x.float() / scale).clamp(-120, 135)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, (levels * scale).bfloat16())
    assert torch.equal(gradient(x, 0.037, 120, QuantSpec("uint8")), torch.ones_like(x))


def test_spec_names_the_field_and_what_is_allowed() -> None:
    granularity: Any = "per_channel"
    with pytest.raises(ValueError, match=r"dtype=int5: expected one of .*int8"):
        QuantSpec("int5")
    with pytest.raises(
        ValueError, match=r"granularity='per_channel': expected PerTensor\(\), PerChannel\(axis\)"
    ):
        QuantSpec(granularity=granularity)


def _at(x: Tensor, value: float) -> Tensor:
    """Returns a copy of `x` with one value replaced."""
    x = x.clone()
    x[3, 1, 2] = value
    return x


# Kinds of weight channels, made from normal noise.
CHANNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "empty": torch.zeros_like,
    "outlier": lambda x: _at(x, 9.0),  # worth clipping if the steps are coarse
    "constant": lambda x: torch.full_like(x, -2.5),
    "two modes": lambda x: 0.05 * x + 4 * x.sign(),
    "negative": lambda x: -x.abs() - 0.5,
    "denormal": lambda x: x * 1e-41,
    "huge": lambda x: x * 5e16,  # its squared errors still fit float32
    "one": lambda x: _at(torch.zeros_like(x), 0.7),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reduce_range", [False, True])
def test_the_weight_scales_of_channels_against_a_loop(axis: int, reduce_range: bool) -> None:
    """The loop finds the largest value of each channel, and the share of it with the least squared error."""
    spec = QuantSpec("int8", symmetric=True, granularity=PerChannel(axis), reduce_range=reduce_range)
    noise = torch.randn(len(CHANNELS), 9, 40, 40, generator=torch.Generator().manual_seed(0))
    w = torch.stack([make(x) for make, x in zip(CHANNELS.values(), noise, strict=True)], axis)
    full = numerics.weight_scale(w, spec)
    scales = full * numerics.mse_clip(w, spec, steps=13)
    largest, clipped = 63 if reduce_range else 127, []
    for i, name in enumerate(CHANNELS):
        x = w.select(axis, i).double().numpy()
        whole = max(np.abs(x).max() / largest, numerics.MIN_SCALE)
        assert full[i].item() == pytest.approx(whole, rel=1e-6), name
        tried = [whole * f for f in np.linspace(1, 0.4, 13)]
        errors = [((np.clip(np.round(x / s), -largest, largest) * s - x) ** 2).sum() for s in tried]
        assert scales[i].item() == pytest.approx(tried[int(np.argmin(errors))], rel=1e-5), name
        clipped += [name] if np.argmin(errors) else []
    assert "outlier" in clipped


def test_one_scale_of_least_squares_for_a_whole_weight() -> None:
    spec = QuantSpec("int8", symmetric=True, reduce_range=True)
    w = torch.cat([torch.randn(50_000, generator=torch.Generator().manual_seed(0)), torch.tensor([7.0])])
    widest = numerics.weight_scale(w, spec)
    best = widest * numerics.mse_clip(w, spec)
    error = [(numerics.fake_quantize_weight(w, s, spec) - w).square().sum() for s in (best, widest)]
    assert best.ndim == 0 and best < widest and error[0] < error[1]


@pytest.mark.parametrize("values", [1, 2**15 - 1, 2**15 + 1, 3 * 2**15])
def test_pieces_are_rounded_as_the_whole_by_onnx(values: int) -> None:
    x = awkward(0.037).repeat(values // 4805 + 1)[:values]
    q = onnx_run("QuantizeLinear", x.numpy(), np.array(0.037, np.float32), np.array(120, np.uint8), 1)
    expected = (q.astype(np.float32) - 120) * np.float32(0.037)
    got = numerics.to_steps(x, float(np.float32(0.037)), -120, 135)
    assert np.array_equal(got.numpy(), expected)


@pytest.mark.parametrize("form", ["channels last", "transposed", "every other", "no image"])
def test_steps_follow_the_memory_of_what_is_rounded(form: str) -> None:
    x = torch.randn(3, 8, 50, 60, generator=torch.Generator().manual_seed(0))
    x = {
        "channels last": lambda: x.contiguous(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(1, 3),
        "every other": lambda: x[:, ::2],
        "no image": lambda: x[:0],
    }[form]()
    before, got = x.clone(), numerics.to_steps(x, 0.01, -128, 127)
    assert torch.equal(x, before)
    assert got.shape == x.shape and (form == "every other" or got.stride() == x.stride())
    expected = np.clip(np.round(x.numpy() / np.float32(0.01)), -128, 127) * np.float32(0.01)
    assert np.array_equal(got.numpy(), expected)
