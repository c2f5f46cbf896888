"""Tests of Conv and Linear with a fused, trained BatchNorm against separate layers: values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from chain import noise
from torch import Tensor, nn

from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.granularity import PerChannel
from qatkit.quant.qat_layers import QAT_TYPES, QATConv2d, QATOperator, fold_batch_norm
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

CASES: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "conv2d": (lambda: nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d, (6, 4, 7, 7)),
    "conv2d with bias": (lambda: nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d, (6, 4, 7, 7)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d, (6, 8, 7, 7)),
    "reflect padding": (
        lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d,
        (6, 4, 7, 7),
    ),
    "conv1d": (lambda: nn.Conv1d(4, 8, 3), nn.BatchNorm1d, (6, 4, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 8, 2), nn.BatchNorm3d, (4, 2, 4, 4, 4)),
    "linear": (lambda: nn.Linear(5, 8), nn.BatchNorm1d, (16, 5)),
    "linear without bias": (lambda: nn.Linear(5, 8, bias=False), nn.BatchNorm1d, (16, 5)),
}


def pair(case: str, gamma_zero: bool = False) -> tuple[nn.Module, Any, Tensor]:
    """Returns the operator, a BatchNorm with random statistics, and an input."""
    make, norm, shape = CASES[case]
    torch.manual_seed(0)
    op, bn = make(), cast(Any, norm(8))
    nn.init.uniform_(bn.weight, -1.5, 1.5)
    nn.init.normal_(bn.bias)
    nn.init.normal_(bn.running_mean)
    nn.init.uniform_(bn.running_var, 0.3, 3)
    if gamma_zero:
        with torch.no_grad():
            bn.weight[::2] = 0.0
    return op, bn, noise(*shape)


def fused(op: nn.Module, bn: nn.Module, frozen: bool = False) -> QATOperator:
    return QAT_TYPES[type(op)].from_float(copy.deepcopy(op), copy.deepcopy(bn), frozen)


@pytest.mark.parametrize("gamma_zero", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_in_inference_it_is_the_pair(case: str, gamma_zero: bool) -> None:
    op, bn, x = pair(case, gamma_zero)
    expected = bn.eval()(op(x))
    module = fused(op, bn).eval()
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
    weight, bias = fold_batch_norm(cast(Tensor, op.weight), cast("Tensor | None", op.bias), bn)
    torch.testing.assert_close(module.run(x, weight, bias), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gamma_zero", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_in_training_it_equals_the_pair_including_gradients(case: str, gamma_zero: bool) -> None:
    op, bn, x = pair(case, gamma_zero)
    module = fused(op, bn).train()
    expected, got = bn.train()(op(x)), module(x)
    upstream = noise(*expected.shape, seed=5)
    expected.backward(upstream)
    got.backward(upstream)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    new = cast(nn.BatchNorm2d, module.bn)
    torch.testing.assert_close(new.running_mean, bn.running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(new.running_var, bn.running_var, rtol=1e-4, atol=1e-5)
    assert new.num_batches_tracked == bn.num_batches_tracked == 1
    for name, mine, theirs in (
        ("weight", module.weight, op.weight),
        ("gamma", new.weight, bn.weight),
        ("beta", new.bias, bn.bias),
    ):
        grad = cast(Tensor, theirs.grad)
        scale = grad.abs().max().item()
        assert mine.grad is not None, name
        assert (mine.grad - grad).abs().max() <= 1e-4 * scale, name
    if op.bias is not None:
        # BatchNorm subtracts the mean, so a bias before it only has the gradient of rounding errors.
        assert cast(Tensor, module.bias).grad is not None
        assert cast(Tensor, cast(Tensor, module.bias).grad).abs().max() < 1e-4


@pytest.mark.parametrize("gamma_zero", [False, True])
def test_the_weight_is_quantized_as_it_ships(gamma_zero: bool) -> None:
    """In inference, the weight is the rounded folded one; in training, the output is near that of float."""
    op, bn, x = pair("conv2d", gamma_zero)
    module = fused(op, bn)
    spec = QuantSpec("int8", symmetric=True, granularity=PerChannel(0))
    module.weight_fake_quant = WeightFakeQuantize(spec, cast(Tensor, op.weight).shape)
    module.weight_fake_quant.enabled = True
    weight, bias = fold_batch_norm(cast(Tensor, op.weight), None, bn)
    scale = (weight.abs().amax(dim=(1, 2, 3), keepdim=True) / 127).clamp(min=1e-12)
    expected = nn.functional.conv2d(x, torch.round(weight / scale) * scale, bias, padding=1)
    torch.testing.assert_close(module.eval()(x), expected, rtol=1e-5, atol=1e-5)
    got = module.train()(x)
    got.sum().backward()
    assert torch.isfinite(cast(Tensor, module.weight.grad)).all()
    assert (got - bn.train()(op(x))).abs().max() < 0.1


@pytest.mark.parametrize("case", ["conv2d with bias", "linear"])
def test_bias_is_rounded_to_input_scale_times_weight_scale(case: str) -> None:
    """Between two quantized tensors, the requantization factor is p/q with odd q (computed by hand)."""
    op, _, x = pair(case)
    module = QAT_TYPES[type(op)].from_float(copy.deepcopy(op))
    fake = WeightFakeQuantize(
        QuantSpec("int8", symmetric=True, granularity=PerChannel(0)), cast(Tensor, op.weight).shape
    )
    fake.enabled, module.weight_fake_quant = True, fake
    source, target = (FakeQuantize(QuantSpec("uint8"), None, (0.0, high)) for high in (2.0, 5.0))
    fake.between(source, target)
    weight, bias = (cast(Tensor, t).detach().double() for t in (op.weight, op.bias))
    s_x, s_y = float(source.scale), float(target.scale)
    raw = weight.abs().flatten(1).amax(1) / 127 * s_x / s_y
    p = torch.ceil(256 * raw)
    q = torch.floor(p / raw)
    q = torch.where(q % 2 == 0, q - 1, q)
    scale = p / q * s_y / s_x
    column = scale.view(-1, *[1] * (weight.ndim - 1))
    got_weight, got_bias = module.quantized(*module.effective())
    torch.testing.assert_close(
        got_weight.double(), torch.round(weight / column) * column, rtol=1e-6, atol=1e-8
    )
    step = scale * s_x
    assert got_bias is not None
    torch.testing.assert_close(got_bias.double(), torch.round(bias / step) * step, rtol=1e-6, atol=1e-8)
    assert (got_bias.double() - bias).abs().max() > 0
    module(x).sum().backward()
    plain = copy.deepcopy(op)
    plain(x).sum().backward()
    assert module.bias is not None and module.bias.grad is not None
    torch.testing.assert_close(module.bias.grad, cast(Tensor, plain.bias).grad)


def test_frozen_statistics_survive_train() -> None:
    op, bn, x = pair("conv2d")
    module = nn.Sequential(fused(op, bn, frozen=True))
    module.train()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    got = module(x)
    module.train(False)
    module.train(True)
    module(x)
    torch.testing.assert_close(got, bn.eval()(op(x)), rtol=1e-5, atol=1e-5)
    assert module[0].training and not cast(nn.Module, module[0].bn).training
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


@pytest.mark.parametrize("case", CASES)
def test_without_batch_norm_it_equals_and_shares_the_operator(case: str) -> None:
    op, _, x = pair(case)
    module = QAT_TYPES[type(op)].from_float(op)
    assert torch.equal(module(x), op(x))
    assert module.weight is op.weight and module.bias is op.bias
    assert list(module.state_dict()) == list(op.state_dict())
    assert not hasattr(op, "bn")  # the original is unchanged


def test_a_compiled_backward_pass_uses_the_initial_statistics() -> None:
    """The variance of a trained BatchNorm scales the weight and is updated in the same pass.

    Only the partitioner of torch.compile reveals which of the two values the backward pass uses.
    """
    torch.manual_seed(0)
    conv, bn = nn.Conv2d(3, 8, 3).double(), nn.BatchNorm2d(8).double()
    layer = QATConv2d.from_float(conv, bn)
    x, gradients = torch.randn(6, 3, 7, 7, dtype=torch.float64), []
    for run in (layer, torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=False)):
        bn.reset_running_stats()
        layer.zero_grad()
        run(x).square().mul(torch.arange(8.0).view(-1, 1, 1)).sum().backward()
        gradients.append([p.grad.clone() for p in (conv.weight, bn.weight, bn.bias) if p.grad is not None])
        assert float(torch.as_tensor(bn.running_var).sub(1).abs().min()) > 0
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
