"""Tests of the quantizers of number formats: outputs, gradients, and where their scales come from."""

from __future__ import annotations

import pytest
import torch
from chain import noise

from qatkit.quant.backends import SIMULATED
from qatkit.quant.formats.blocks import quantized, tensor_scale
from qatkit.quant.formats.quantizers import FormatFakeQuantize, FormatWeightFakeQuantize
from qatkit.quant.formats.table import FORMATS
from qatkit.quant.granularity import AlongAxis, PerTensor
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.spec import QuantSpec


def spec(name: str, axis: int = -1) -> QuantSpec:
    return QuantSpec(name, symmetric=True).along(axis)


def activation(name: str) -> FormatFakeQuantize:
    return FormatFakeQuantize(spec(name), MinMaxObserver())


def observed(name: str, x: torch.Tensor) -> FormatFakeQuantize:
    quantizer = activation(name).eval()
    quantizer.set_phase(observe=True, quantize=False, calibrating=True)
    quantizer(x)
    quantizer.finish()
    quantizer.settle()
    quantizer.set_phase(observe=False, quantize=True)
    return quantizer


@pytest.mark.parametrize("name", FORMATS)
def test_an_activation_passes_as_its_format_holds_it(name: str) -> None:
    x = noise(4, 50)
    form, quantizer = FORMATS[name], observed(name, x)
    scale = tensor_scale(x.abs().amax(), form) if form.has_tensor_scale else torch.ones(())
    assert torch.equal(quantizer(x), quantized(x, form, form.granularity(-1), scale)[0])
    assert torch.equal(quantizer.scale, scale)


def test_a_tensors_scale_is_that_of_calibration() -> None:
    quantizer = observed("float8_e4m3fn", torch.tensor([-2.0, 1.0]))
    assert quantizer(torch.tensor([4.0, -4.0])).tolist() == [2.0, -2.0]


@pytest.mark.parametrize("name", ["mxfp4", "float8_e4m3fn", "nvfp4"])
def test_the_gradient_passes_where_nothing_saturates(name: str) -> None:
    x = torch.tensor([[1.0, 7.9, -7.5, 0.01, 0.0]], requires_grad=True)
    quantizer = observed(name, torch.tensor([6.0]))
    quantizer(x).backward(torch.full((1, 5), 3.0))
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 0.0, 0.0, 3.0, 3.0]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_rounded_and_its_bias_stays(name: str) -> None:
    weight, bias = noise(6, 40).requires_grad_(), noise(6)
    quantizer = FormatWeightFakeQuantize(spec(name, 1), weight.shape)
    assert torch.equal(quantizer(weight, bias)[0], weight)
    quantizer.set_phase(observe=False, quantize=True)
    found, same = quantizer(weight, bias)
    form = FORMATS[name]
    scale = tensor_scale(weight.detach().abs().amax(), form)
    assert torch.equal(found, quantized(weight.detach(), form, form.granularity(1), scale)[0])
    assert same is bias
    found.sum().backward()
    assert weight.grad is not None and weight.grad.max() == 1


def test_a_format_has_no_integers() -> None:
    quantizer = FormatWeightFakeQuantize(spec("mxfp4", 1), (4, 32))
    with pytest.raises(TypeError, match="mxfp4: a number format has no integers"):
        quantizer.integers(noise(4, 32), None, torch.ones(()))
    assert not spec("mxfp4").has_zero_point
    assert not spec("mxfp4").guards_pairs


def test_blocks_have_an_axis_and_tensors_one_scale() -> None:
    assert spec("mxfp4", 1).granularity == AlongAxis(32, 1)
    assert spec("bfp16", -1).granularity == AlongAxis(8, -1)
    assert spec("float8_e5m2", 1).granularity == PerTensor()


def test_half_precision_passes_in_its_own_type() -> None:
    quantizer = observed("mxfp4", noise(2, 32))
    assert quantizer(noise(2, 32).bfloat16()).dtype == torch.bfloat16


def test_a_backend_has_formats_on_both_sides_or_none() -> None:
    from dataclasses import replace

    from qatkit_verify.errors import ConfigError

    assert SIMULATED.label == "simulated MXFP8_E4M3 x MXFP8_E4M3"
    with pytest.raises(ConfigError, match=r"a number format, since activation\.dtype=mxfp8_e4m3 is one"):
        replace(SIMULATED, weight=QuantSpec("int8"))
