"""Tests of the integers and multipliers of 8-bit and 16-bit biases against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qatkit.quant.bias_types import rounded_bias, whole_bias
from qatkit.quant.spec import QuantSpec

LARGEST = {"int8": 127, "int16": 32767}


def drawn(step: torch.Tensor) -> torch.Tensor:
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 0.3
    return bias * (step / step.max()) if step.ndim else bias


def steps(per_channel: bool) -> torch.Tensor:
    made = torch.rand(64, generator=torch.Generator().manual_seed(1)) * 1e-5 + 1e-6
    return made if per_channel else made[0]


@pytest.mark.parametrize("scale_type", ["float", "pow2"])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("dtype", LARGEST)
def test_a_bias_is_within_half_a_step_of_the_type(dtype: str, per_channel: bool, scale_type: str) -> None:
    """The step is the smallest with which the largest value fits; powers of two at most double it."""
    step = steps(per_channel)
    bias, spec = drawn(step), QuantSpec("int8", symmetric=True, bias_dtype=dtype, scale_type=scale_type)
    whole, multiplier = whole_bias(bias, step, spec)
    assert whole.shape == bias.shape and multiplier.shape == step.shape
    assert whole.abs().max() <= LARGEST[dtype] and (multiplier == multiplier.round()).all()
    if scale_type == "pow2":
        assert (np.frexp(multiplier.numpy())[0] == 0.5).all()
    found = (whole * multiplier * step.double()).numpy()
    reach = np.abs(bias.double().numpy())
    reach = reach if per_channel else reach.max()
    least = np.maximum(reach / LARGEST[dtype], step.double().numpy())
    coarser = 2.0 if scale_type == "pow2" else 1.0 + 16 / np.maximum(least / step.double().numpy(), 1)
    assert (np.abs(found - bias.double().numpy()) <= 0.5 * coarser * least * (1 + 1e-9)).all()


def test_one_value_per_scale_is_nearly_kept() -> None:
    """Integer and multiplier are chosen together; rounding to 127 steps alone would lose up to 1/254."""
    step = steps(True)
    bias = drawn(step)
    spec = QuantSpec("int8", symmetric=True, bias_dtype="int8")
    whole, multiplier = whole_bias(bias, step, spec)
    error = (whole * multiplier * step.double() - bias).abs() / bias.abs()
    assert error.median() < 3e-4 and error.max() < 3e-3


def test_int16_equals_int32_where_it_fits() -> None:
    step = torch.tensor(4e-5)
    bias = drawn(step)
    found = [
        rounded_bias(bias, step, QuantSpec("int8", bias_dtype=kind)) for kind in ("int16", "int32", "float")
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[1])
    exact = np.round(bias.double().numpy() / np.float64(np.float32(4e-5))) * np.float64(np.float32(4e-5))
    np.testing.assert_allclose(found[0].numpy(), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "int16", "int8", "float"])
def test_the_gradient_goes_straight_through(dtype: str) -> None:
    bias = drawn(steps(True)).requires_grad_()
    rounded_bias(bias, steps(True), QuantSpec("int8", bias_dtype=dtype)).sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.ones_like(bias))
