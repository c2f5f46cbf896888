"""Tests of preparing a graph for QAT: dtypes, per-channel weights, phases, and gradients in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from chain import SMALL, Chain, Residual, build, calibrated, noise, prepared, settle, small_vit
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.calibration import calibrate
from qatkit.graph.fuse import fuse
from qatkit.graph.phase import freeze_batch_norm, set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers
from qatkit.quant.backends import FBGEMM, QNNPACK, Backend
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit_verify.errors import ConfigError


def operators(graph: nn.Module) -> dict[str, QATOperator]:
    return {n: m for n, m in graph.named_modules() if isinstance(m, QATOperator)}


@pytest.mark.parametrize(
    ("backend", "dtype"), [(FBGEMM, "uint8"), (QNNPACK, "int8")], ids=["fbgemm", "qnnpack"]
)
@pytest.mark.parametrize("reduced", [False, True])
def test_dtypes_and_per_channel_weights(backend: Backend, dtype: str, reduced: bool) -> None:
    backend = backend.reduced(reduced)
    graph = prepared(Chain(), noise(2, 3, 12, 12), backend)
    assert {m.spec.dtype for m in fake_quantizers(graph).values()} == {dtype}
    assert not any(m.spec.symmetric for m in fake_quantizers(graph).values())
    for module in operators(graph).values():
        quantizer = module.weight_fake_quant
        assert quantizer is not None
        largest = module.weight.detach().abs().amax(dim=(1, 2, 3))
        excess = quantizer.scale(module.weight) / (largest / (63 if reduced else 127))
        assert ((excess > 1 - 1e-6) & (excess < 1.01)).all()  # alignment raises scales
        quantizer.enabled = True
        levels = quantizer(module.weight)[0].detach() / quantizer.scale(module.weight).view(-1, 1, 1, 1)
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)
        assert levels.abs().max().round() in ((62, 63) if reduced else (126, 127))


def test_calibration_sees_the_float_activations() -> None:
    """The range of each quantizer must be that of the float model's activations."""
    model, x = settle(Residual(), 3, 12, 12), noise(8, 3, 12, 12, seed=4)
    seen: dict[str, Tensor] = {"input": x}
    after = {"stem": "stem", "bn1": "conv1", "bn2": "conv2", "avgpool": "avgpool"}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _m, _i, y, p=point: seen.__setitem__(p, y.detach().clone())
        )
        for name, point in after.items()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    for name in ("stem", "conv1"):
        seen[name] = F.relu(seen[name])
    seen["add"] = F.relu(seen["conv2"] + F.max_pool2d(seen["stem"], 2))
    graph = calibrated(model, x)
    found = fake_quantizers(graph)
    assert sorted(found) == sorted(seen)
    for name, value in seen.items():
        low, high = min(value.min().item(), 0.0), max(value.max().item(), 0.0)
        quantizer = found[name]
        assert quantizer.observer is not None
        assert min(quantizer.observer.low.item(), 0.0) == pytest.approx(low, rel=1e-5, abs=1e-5), name
        assert quantizer.observer.high.item() == pytest.approx(high, rel=1e-5), name
        assert 1 - 1e-5 < quantizer.scale.item() * 255 / (high - low) < 1.03, name


@pytest.mark.parametrize(
    ("name", "limit"),
    [("chain", 1e-3), ("residual", 1e-3), ("mlp", 1e-3), ("gate", 1e-3), ("resnet18", 0.05)],
)
def test_quantized_output_is_near_the_float_one(name: str, limit: float) -> None:
    """Limits are noise-to-signal ratios. An 8-bit tensor adds about 1e-4; a ResNet has 20 layers of them."""
    torch.manual_seed(0)
    if name == "resnet18":
        model, x = build(name, 32), noise(16, 3, 32, 32)
    else:
        kind, shape = SMALL[name]
        model, x = settle(kind(), *shape), noise(16, *shape)
    with torch.no_grad():
        expected, got = model(x), calibrated(model, x)(x)
    assert 0 < (got - expected).pow(2).mean() / expected.var() < limit


def test_phases() -> None:
    model, x = settle(Residual(), 3, 12, 12), noise(8, 3, 12, 12)
    graph = prepared(model, x).eval()
    plain = graph(x)
    assert not any(q.observer is not None and q.observer.seen for q in fake_quantizers(graph).values())
    assert calibrate(graph, [x, x[:3]]) == 11
    set_phase(graph, observe=False, quantize=False)
    assert torch.equal(graph(x), plain)
    set_phase(graph, observe=False, quantize=True)
    before = {k: v.clone() for k, v in graph.state_dict().items()}
    quantized = graph(x * 3)
    assert not torch.equal(quantized, model(x * 3))
    assert all(torch.equal(v, before[k]) for k, v in graph.state_dict().items())
    set_phase(graph, observe=True, quantize=True)
    graph(x * 3)
    moved = [k for k, v in graph.state_dict().items() if not torch.equal(v, before[k])]
    assert "input_quant.scale" in moved and not any("weight" in k for k in moved)


def test_the_observer_is_a_choice() -> None:
    graph = prepare_qat(
        fuse(Chain(), noise(2, 3, 12, 12)).graph,
        FBGEMM,
        noise(2, 3, 12, 12),
        quantizers=Quantizers(observer=MinMaxObserver),
    ).graph
    assert {type(q.observer) for q in fake_quantizers(graph).values()} == {MinMaxObserver}


def test_freeze_batch_norm_stops_statistics_for_good() -> None:
    graph = prepared(settle(Chain(), 3, 12, 12), noise(2, 3, 12, 12), batch_norm="train").train()
    norms = [cast(nn.BatchNorm2d, m.bn) for m in operators(graph).values() if m.bn is not None]
    assert len(norms) == 2 and all(bn.training for bn in norms)
    freeze_batch_norm(graph)
    graph.eval()
    graph.train()
    means = [cast(Tensor, bn.running_mean).clone() for bn in norms]
    graph(noise(4, 3, 12, 12) * 5)
    assert not any(bn.training for bn in norms)
    assert all(torch.equal(m, cast(Tensor, bn.running_mean)) for m, bn in zip(means, norms, strict=True))


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="no Conv, Linear, LSTM"):
        prepare_qat(fuse(nn.Sequential(nn.ReLU()), noise(2, 3)).graph, FBGEMM, noise(2, 3))


def loss(graph: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(graph(x), torch.arange(len(x)) % 10)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (lambda: build("resnet18", 32), 32),
    "mobilenet_v3_small": (lambda: build("mobilenet_v3_small", 64), 64),
    "vit": (small_vit, 32),
}


@pytest.mark.parametrize(
    ("name", "batch_norm"),
    [(n, b) for n in MODELS for b in ("fold", "freeze", "train") if n != "vit" or b == "fold"],
)
def test_one_step_reaches_every_parameter(name: str, batch_norm: str) -> None:
    make, size = MODELS[name]
    x = noise(8, 3, size, size)
    graph = calibrated(make(), x, batch_norm=batch_norm).train()
    loss(graph, x).backward()
    grads = {n: p.grad for n, p in graph.named_parameters()}
    assert [n for n, g in grads.items() if g is None or not torch.isfinite(g).all()] == []
    assert [n for n, g in grads.items() if g is not None and not g.any()] == []
    torch.optim.SGD(graph.parameters(), lr=1e-3).step()
    graph.eval()
    assert torch.isfinite(graph(x)).all()


def test_training_with_fake_quantization_learns_as_float_does() -> None:
    """Ten steps on one batch reduce the loss as much with fake quantization as without it.

    With weights guarded against saturation, which have larger steps, the loss also falls below a tenth.
    """
    x, curves = noise(8, 3, 32, 32), []
    for quantize, backend in ((False, FBGEMM), (True, FBGEMM.reduced(False)), (True, FBGEMM)):
        graph = calibrated(build("resnet18", 32), x, backend).train()
        set_phase(graph, observe=False, quantize=quantize)
        optimizer, losses = torch.optim.SGD(graph.parameters(), lr=1e-3), []
        for _ in range(10):
            optimizer.zero_grad()
            current = loss(graph, x)
            current.backward()
            optimizer.step()
            losses.append(current.item())
        curves.append(losses)
    assert all(curve[-1] < 0.1 * curve[0] for curve in curves[1:])
    assert curves[0] != curves[1]
    assert curves[1] == pytest.approx(curves[0], abs=0.1 * curves[0][0])
