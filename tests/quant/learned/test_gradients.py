"""Tests of learned quantizers' gradients against the papers' formulas in float64 NumPy and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from chain import noise
from torch import Tensor, nn

from qatkit.quant.fake_quantize import Bounds, FakeQuantize
from qatkit.quant.granularity import Granularity, PerChannel, PerTensor
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.learned.lsq_plus import LSQPlusFakeQuantize
from qatkit.quant.learned.pact import PACTFakeQuantize
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.spec import QuantSpec

X = noise(4, 3, 9, 9) * 2 + 0.3
G = noise(4, 3, 9, 9, seed=1)
UINT8 = QuantSpec()


def begun(kind: type[FakeQuantize], bounds: Bounds = (None, None), spec: QuantSpec = UINT8) -> FakeQuantize:
    """Returns a learning quantizer calibrated on a narrower range than `X`, so that it clips at both ends."""
    quantizer = kind(spec, MinMaxObserver(), bounds)
    quantizer.features = 243
    quantizer.observe(X.clamp(-1.5, 2.5))
    quantizer.settle()
    quantizer.begin()
    quantizer.set_phase(observe=True, quantize=True)
    return quantizer


def backward(quantizer: nn.Module, x: Tensor = X, g: Tensor = G) -> Tensor:
    """Returns the gradient of x; those of the parameters are in their `grad`."""
    x = x.clone().requires_grad_()
    quantizer(x).backward(g)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bounds", [(0.0, None), (None, None)])
@pytest.mark.parametrize("spec", [QuantSpec(), QuantSpec("int8", symmetric=True)], ids=["uint8", "int8"])
def test_lsq_is_the_papers_formula(layout: torch.memory_format, bounds: Bounds, spec: QuantSpec) -> None:
    """Esser et al. 2020, equations 1 to 3 and section 2.2, after subtracting the zero_point."""
    quantizer = begun(LSQFakeQuantize, bounds, spec)
    assert isinstance(quantizer, LSQFakeQuantize)
    to_x = backward(quantizer, X.to(memory_format=layout), G.to(memory_format=layout)).numpy()
    assert quantizer.step is not None and quantizer.step.grad is not None
    s, z = quantizer.scale.double().item(), quantizer.zero_point.item()
    low, high = (end - z for end in spec.type_range)
    v, g = X.double().numpy() / s, G.double().numpy()
    inside = (v > low) & (v < high)
    slope = np.where(inside, np.round(v) - v, np.where(v <= low, low, high))
    expected = (g * slope).sum() / math.sqrt(243 * spec.quant_max)
    assert quantizer.step.grad.item() == pytest.approx(expected, rel=2e-4)
    np.testing.assert_array_equal(to_x, np.where(inside, G.numpy(), 0))


def test_lsq_plus_is_the_papers_formula() -> None:
    """Bhalgat et al. 2020, equations 3 to 6: a range that begins at β, here a whole number of steps."""
    quantizer = begun(LSQPlusFakeQuantize)
    assert isinstance(quantizer, LSQPlusFakeQuantize)
    to_x = backward(quantizer).numpy()
    assert quantizer.step is not None and quantizer.offset is not None
    assert quantizer.step.grad is not None and quantizer.offset.grad is not None
    s, beta = quantizer.scale.double().item(), -quantizer.zero_point.item() * quantizer.scale.double().item()
    v, g = (X.double().numpy() - beta) / s, G.double().numpy()
    inside = (v > 0) & (v < 255)
    slope = np.where(inside, np.round(v) - v, np.where(v <= 0, 0, 255))
    factor = 1 / math.sqrt(243 * 255)
    assert quantizer.step.grad.item() == pytest.approx((g * slope).sum() * factor, rel=2e-4)
    assert quantizer.offset.grad.item() == pytest.approx((g * ~inside).sum() * factor, rel=1e-5)
    np.testing.assert_array_equal(to_x, np.where(inside, G.numpy(), 0))


def test_pact_is_the_papers_formula() -> None:
    """Choi et al. 2018, equation 3: the clipping value's gradient is the sum over all clipped values."""
    quantizer = begun(PACTFakeQuantize, (0.0, None))
    assert isinstance(quantizer, PACTFakeQuantize)
    backward(quantizer)
    assert quantizer.step is not None and quantizer.step.grad is not None
    alpha = quantizer.step.item()
    assert alpha == pytest.approx(2.5)
    assert quantizer.step.grad.item() == pytest.approx(G[alpha <= X].double().sum().item(), rel=1e-5)


def test_pact_leaves_a_range_below_zero_to_its_observer() -> None:
    quantizer = begun(PACTFakeQuantize)
    assert not quantizer.learns and not list(quantizer.parameters())


@pytest.mark.parametrize("granularity", [lambda _: PerTensor(), PerChannel], ids=["tensor", "channel"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((6, 4, 3, 3), 0),
        ((6, 10), 0),
        ((500, 40, 5, 5), 0),
        ((4, 6, 3, 3), 1),
        ((4, 1, 3, 3), 1),
        ((1, 5), 0),
    ],
)
def test_a_weights_scales_have_the_gradients_that_autograd_finds(
    granularity: Callable[[int], Granularity], shape: tuple[int, ...], axis: int
) -> None:
    """Covers output channels on axis 0 and 1 (transposed convolutions), and weights processed in parts."""
    spec = QuantSpec("int4", symmetric=True, granularity=granularity(axis))
    quantizer = LSQWeightFakeQuantize(spec, shape)
    weight, g = noise(*shape), noise(*shape, seed=2)
    quantizer.clip_to(torch.full_like(quantizer.clip, 0.6))
    quantizer.begin(weight)
    quantizer.enabled = True
    learned = weight.clone().requires_grad_()
    y, _ = quantizer(learned)
    y.backward(g)
    assert quantizer.step is not None and quantizer.step.grad is not None and learned.grad is not None
    w, s = weight.double().requires_grad_(), quantizer.step.detach().double().requires_grad_()
    column = s if s.ndim == 0 else s.view([-1 if d == axis else 1 for d in range(w.ndim)])
    v = torch.clamp(w / column, -7, 7)
    plain = (v + (torch.round(v) - v).detach()) * column
    plain.backward(g.double())
    assert s.grad is not None and w.grad is not None
    factor = 1 / math.sqrt(weight.numel() / s.numel() * 7)
    np.testing.assert_allclose(quantizer.step.grad, s.grad * factor, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(learned.grad, w.grad, rtol=1e-6)
    np.testing.assert_allclose(y.detach(), plain.detach(), rtol=1e-6)


@pytest.mark.parametrize("kind", [LSQFakeQuantize, LSQPlusFakeQuantize])
def test_gradients_of_parts_of_a_batch_add_up(kind: type[FakeQuantize]) -> None:
    whole, parts = begun(kind), begun(kind)
    backward(whole)
    for i in range(4):
        backward(parts, X[i : i + 1], G[i : i + 1])
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert b.grad.item() == pytest.approx(a.grad.item(), rel=1e-4)


def test_a_relu6_keeps_its_end_and_a_scale_stays_above_zero() -> None:
    quantizer = begun(LSQFakeQuantize, (0.0, 6.0))
    assert isinstance(quantizer, LSQFakeQuantize) and quantizer.step is not None
    for wanted, got in ((1.0, 6 / 255), (-1.0, 1e-12)):
        with torch.no_grad():
            quantizer.step.fill_(wanted)
        quantizer.settle()
        assert quantizer.scale.item() == pytest.approx(got)


def test_what_was_fixed_is_not_learned() -> None:
    quantizer = LSQFakeQuantize(QuantSpec(), MinMaxObserver())
    quantizer.observe(X)
    quantizer.fix(torch.tensor(0.5), torch.tensor(3, dtype=torch.int32))
    quantizer.begin()
    weight = LSQWeightFakeQuantize(QuantSpec("int8", symmetric=True), (6,))
    weight.fix(torch.tensor(0.25))
    weight.begin(noise(6, 4))
    assert not [*quantizer.parameters(), *weight.parameters()]
    assert not quantizer.learns and not weight.learns
