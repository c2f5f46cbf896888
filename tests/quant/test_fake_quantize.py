"""Tests of FakeQuantize (off, observing, with absorbed activations) and of WeightFakeQuantize."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.quant.fake_quantize import Bounds, FakeQuantize
from qatkit.quant.granularity import PerChannel, PerTensor
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

X = torch.linspace(-9, 9, 2001)
ACTIVATIONS: dict[str, tuple[Bounds, Callable[[Tensor], Tensor]]] = {
    "none": ((None, None), lambda x: x),
    "relu": ((0.0, None), F.relu),
    "relu6": ((0.0, 6.0), F.relu6),
}


def quantizer(bounds: Bounds = (None, None), dtype: str = "uint8", x: Tensor = X) -> FakeQuantize:
    """Returns an enabled quantizer calibrated on `x`."""
    module = FakeQuantize(QuantSpec(dtype), MinMaxObserver(), bounds)
    module.observing = True
    module(x)
    module.observing, module.enabled = False, True
    return module


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_disabled_is_the_plain_activation(name: str) -> None:
    bounds, plain = ACTIVATIONS[name]
    module = FakeQuantize(QuantSpec(), MinMaxObserver(), bounds)
    assert torch.equal(module(X), plain(X))
    assert not module.observer.seen  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_enabled_is_the_activation_within_half_a_step(name: str, dtype: str) -> None:
    bounds, plain = ACTIVATIONS[name]
    module = quantizer(bounds, dtype)
    step = module.scale.item()
    assert step == pytest.approx({"none": 18, "relu": 9, "relu6": 6}[name] / 255, rel=1e-6)
    assert (module(X) - plain(X)).abs().max() <= step * 0.5001
    if name != "none":
        assert module.zero_point.item() == QuantSpec(dtype).quant_min
        assert module(X).min() == 0
    assert len(module(X).unique()) <= 256


def test_relu6_stays_a_clamp_when_the_range_seen_is_smaller() -> None:
    module = quantizer((0.0, 6.0), x=X.clamp(max=2.5))
    assert module.scale.item() == pytest.approx(2.5 / 255, rel=1e-6)
    assert module(torch.tensor([-4.0, 8.0])).tolist() == pytest.approx([0, 2.5], rel=1e-6)


def test_gradient_through_an_absorbed_relu() -> None:
    x, reference = (torch.randn(300, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    upstream = torch.linspace(-1, 1, 300)
    x.requires_grad_()
    reference.requires_grad_()
    quantizer((0.0, None))(x).backward(upstream)
    F.relu(reference).backward(upstream)
    assert x.grad is not None and reference.grad is not None
    assert torch.equal(x.grad, reference.grad)


def test_observing_follows_what_is_seen_and_then_stays() -> None:
    module = FakeQuantize(QuantSpec(), MinMaxObserver())
    module.observing = True
    module(torch.tensor([-1.0, 1.0]))
    assert module.scale.item() == pytest.approx(2 / 255)
    module(torch.tensor([-1.0, 4.0]))
    assert module.scale.item() == pytest.approx(5 / 255)
    assert module.zero_point.item() == 51
    module.observing = False
    module(torch.tensor([-100.0, 100.0]))
    assert module.scale.item() == pytest.approx(5 / 255)


def test_a_relu_range_without_positive_values_gives_zeros() -> None:
    module = quantizer((0.0, None), x=-X.abs())
    assert torch.equal(module(-X.abs()), torch.zeros_like(X))
    assert torch.isfinite(module(X)).all()


def test_a_fixed_range_is_not_observed() -> None:
    module = FakeQuantize(QuantSpec(), None, (0.0, 1.0))
    module.observing, module.enabled = True, True
    got = module(torch.tensor([0.0, 0.25, 1.0, 3.0]))
    assert module.scale.item() == pytest.approx(1 / 255)
    assert got.tolist() == pytest.approx([0, 64 / 255, 1, 1])


def test_without_observer_both_bounds_are_needed() -> None:
    with pytest.raises(ValueError, match="both bounds"):
        FakeQuantize(QuantSpec(), None, (0.0, None))


def test_state_dict_round_trip() -> None:
    first, second = quantizer((0.0, None)), FakeQuantize(QuantSpec(), MinMaxObserver(), (0.0, None))
    second.load_state_dict(first.state_dict())
    second.enabled = True
    assert torch.equal(first(X), second(X))


def test_weight_quantization_is_off_at_first_and_follows_weights() -> None:
    module = WeightFakeQuantize(QuantSpec("int8", symmetric=True, granularity=PerChannel(0)), (2, 2))
    w = torch.tensor([[1.27, -0.504], [0.0, 12.7]])
    bias = torch.tensor([0.123456, -7.0])
    assert all(a is b for a, b in zip(module(w, bias), (w, bias), strict=True))
    module.enabled = True
    assert module(w, bias)[1] is bias  # without known input and output quantizers, it has no step yet
    assert torch.allclose(module(w)[0], torch.tensor([[1.27, -0.50], [0.0, 12.7]]))
    assert torch.allclose(module.scale(w * 3), torch.tensor([0.03, 0.3]))


def test_a_clipped_weight_and_its_gradient_match_numpy() -> None:
    """With 7 bits, clipping pays off most for the channel that has a 9 among 100,000 normal weights."""
    spec = QuantSpec("int8", symmetric=True, granularity=PerChannel(0), reduce_range=True)
    w = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0)).clamp_(-3, 3)
    w[0, 0] = 9.0
    w.requires_grad_()
    module = WeightFakeQuantize(spec, w.shape)
    module.clip_to_least_error(w)
    module.enabled = True
    assert module.clip[0] < 0.5 and module.clip[1] > 0.8
    scale = np.abs(w.detach().numpy()).max(1, keepdims=True) / 63 * module.clip.numpy()[:, None]
    expected = np.clip(np.round(w.detach().numpy() / scale), -63, 63) * scale
    restored = WeightFakeQuantize(spec, w.shape)
    restored.load_state_dict(module.state_dict())
    restored.enabled = True
    for one in (module, restored):
        got, _ = one(w)
        np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-6, atol=1e-7)
        (gradient,) = torch.autograd.grad(got.sum(), w)
        inside = np.abs(w.detach().numpy()) <= 63 * scale
        np.testing.assert_array_equal(gradient.numpy(), inside.astype(np.float32))
        assert 0 < (~inside).sum() < 1000


def test_given_integers_ship_and_move_with_the_weight() -> None:
    """Given integers may be far from weight / scale, and are clipped to the type.

    In training, they follow floor(weight / scale).
    """
    spec = QuantSpec("int8", symmetric=True, granularity=PerChannel(0))
    weight = torch.tensor([[0.26, -0.31, 0.5, -5.0], [1.0, 2.5, -0.1, 9.0]])
    scale, integers = torch.tensor([0.1, 0.5]), torch.tensor([[7, -3, -2, -127], [2, 4, 0, 30]])
    module = WeightFakeQuantize(spec, weight.shape)
    module.enabled = True
    module.fix(scale, weight, integers)
    shipped = module.integers(weight, None, torch.ones(()))
    assert shipped.weight.dtype == torch.int8 and torch.equal(shipped.weight, integers.to(torch.int8))
    moved = (weight + 3 * scale[:, None]).requires_grad_()
    floors, before = (np.floor(w.detach().numpy() / scale.numpy()[:, None]) for w in (moved, weight))
    got, _ = module(moved)
    wanted = (integers.numpy() + floors - before) * scale.numpy()[:, None]
    np.testing.assert_allclose(got.detach(), wanted, rtol=1e-6)
    (gradient,) = torch.autograd.grad(got.sum(), moved)
    assert torch.equal(gradient, torch.ones_like(weight))
    module.fix(scale, weight, torch.full_like(weight, 300))
    assert torch.equal(module.whole(weight), torch.full_like(weight, 127))


def test_a_checkpoint_with_up_or_down_roundings_still_loads() -> None:
    weight = torch.tensor([[0.26, -0.31, 0.5], [1.0, 2.5, -0.1]])
    up = torch.tensor([[True, False, True], [False, True, True]])
    module = WeightFakeQuantize(QuantSpec("int8", symmetric=True, granularity=PerChannel(0)), weight.shape)
    scale = torch.tensor([0.1, 0.4])
    module.load_state_dict({"clip": torch.ones(2), "fixed_scale": scale, "rounds_up": up})
    floors = np.floor(weight.numpy() / scale.numpy()[:, None])
    np.testing.assert_array_equal(module.whole(weight), floors + up.numpy())
    assert "rounds_up" not in module.state_dict()


def test_a_clip_of_one_changes_nothing() -> None:
    spec = QuantSpec("int8", symmetric=True, granularity=PerTensor())
    w = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    module = WeightFakeQuantize(spec, w.shape)
    assert module.clip.shape == () and torch.equal(module.scale(w), w.abs().max() / 127)
