"""Tests that training on CUDA agrees with the CPU up to rounding, and that a step never waits for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from chain import Chain, noise, settle
from torch import Tensor

from qatkit.config.schema import ScheduleConfig
from qatkit.quant.backends import FBGEMM, QNNPACK, TENSORRT, Backend
from qatkit.quant.granularity import PerChannel
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.numerics import fake_quantize, fake_quantize_weight, weight_scale
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.train.learner import make_optimizer
from qatkit.train.module import QATModule
from qatkit.train.weight_average import WeightAverage

LSQ = Quantizers(activation=LSQFakeQuantize, weight=LSQWeightFakeQuantize)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_fake_quantization_and_its_gradient_are_those_of_the_cpu(dtype: str) -> None:
    spec, scale, zero = QuantSpec(dtype), torch.tensor(0.037), torch.tensor(5, dtype=torch.int32)
    x = noise(20_000) * 4
    results = []
    for device in ("cpu", "cuda"):
        leaf = x.detach().clone().to(device).requires_grad_()
        y = fake_quantize(leaf, scale.to(device), zero.to(device), spec)
        y.backward(torch.ones_like(y))
        assert leaf.grad is not None
        results.append((y.detach().cpu(), leaf.grad.cpu()))
    # The CUDA kernel multiplies by 1/scale, ours divides: a value on a boundary may round differently.
    apart = (results[0][0] - results[1][0]).abs() > 1e-6
    assert apart.float().mean() < 1e-3 and (results[0][0] - results[1][0]).abs().max() <= scale * 1.001
    assert (results[0][1] != results[1][1]).float().mean() < 1e-3


def test_weights_are_rounded_as_on_the_cpu() -> None:
    weight, spec = noise(32, 16, 3, 3), QuantSpec("int8", symmetric=True, granularity=PerChannel(0))
    here, there = (
        fake_quantize_weight(w, weight_scale(w, spec), spec).cpu() for w in (weight, weight.cuda())
    )
    assert torch.equal(here, there)


@pytest.mark.parametrize("backend", [FBGEMM, QNNPACK, TENSORRT], ids=lambda b: b.name)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_training_step_moves_the_weights_as_on_the_cpu(
    backend: Backend, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ten mantissa bits of TF32 move activations across rounding boundaries.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    images, labels = noise(16, 3, 12, 12), torch.arange(16) % 4
    module = QATModule(settle(Chain(), 3, 12, 12), images[:2], backend=backend)
    module.calibrate([images])
    moved = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(module).to(device).train()
        optimizer = make_optimizer(own.graph, own.schedule, lr=1e-2)
        own.set_phase(0.0)
        with torch.autocast(device, torch.bfloat16, enabled=precision != "32-true"):
            outputs = own(images.to(device))
        loss = torch.nn.functional.cross_entropy(outputs.float().mean((2, 3)), labels.to(device))
        loss.backward()
        optimizer.step()
        moved.append({name: value.detach().cpu() for name, value in own.graph.named_parameters()})
    start = dict(module.graph.named_parameters())
    for name, here in moved[0].items():
        change, other = here - start[name].detach(), moved[1][name] - start[name].detach()
        assert change.abs().max() > 0, name
        tolerance = 0.05 if precision == "32-true" else 0.5
        assert (change - other).norm() <= tolerance * change.norm() + 1e-7, name


def test_a_module_on_the_gpu_converts_to_the_same_integers() -> None:
    images = noise(16, 3, 12, 12)
    module = QATModule(settle(Chain(), 3, 12, 12), images[:2])
    module.calibrate([images])
    there = copy.deepcopy(module).cuda()
    expected, found = module.convert().graph.state_dict(), there.convert().graph.state_dict()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert isinstance(value, Tensor) and torch.equal(value, found[name]), name


@pytest.mark.parametrize("quantizers", [Quantizers(), LSQ], ids=["plain", "lsq"])
def test_a_training_step_does_not_wait_for_the_device(quantizers: Quantizers) -> None:
    images, labels = noise(16, 3, 12, 12).cuda(), torch.arange(16).cuda() % 4
    module = QATModule(settle(Chain(), 3, 12, 12), images[:2].cpu(), quantizers=quantizers)
    module.calibrate([images.cpu()])
    module.begin()
    module.cuda().train()
    optimizer = make_optimizer(module.graph, module.schedule, lr=1e-2)

    def step() -> None:
        module.set_phase(0.0)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(images).mean((2, 3)), labels).backward()
        optimizer.step()

    step()  # the first step may wait while it initializes
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(10):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_optimizer_steps_there(optimizer: str) -> None:
    """A stored optimizer state is on the CPU, and torch leaves some of it there; a step must work nevertheless."""
    images, labels = noise(16, 3, 12, 12).cuda(), torch.arange(16).cuda() % 4
    module = QATModule(
        settle(Chain(), 3, 12, 12), images[:2].cpu(), ScheduleConfig(optimizer=optimizer), quantizers=LSQ
    )
    module.calibrate([images.cpu()])
    module.begin()
    module.cuda().train()
    module.set_phase(0.0)

    def step(taken: torch.optim.Optimizer) -> None:
        taken.zero_grad()
        torch.nn.functional.cross_entropy(module(images).mean((2, 3)), labels).backward()
        taken.step()

    first = make_optimizer(module.graph, module.schedule, lr=1e-2)
    step(first)
    stored = torch.utils._pytree.tree_map_only(Tensor, lambda one: one.cpu(), first.state_dict())
    again = make_optimizer(module.graph, module.schedule, lr=1e-2)
    again.load_state_dict(stored)
    step(again)
    assert all(torch.isfinite(one).all() for one in module.parameters())


def test_the_average_ships_from_a_module_moved_off_the_device() -> None:
    module = QATModule(settle(Chain(), 3, 12, 12), noise(2, 3, 12, 12), quantizers=LSQ)
    module.calibrate([noise(16, 3, 12, 12)])
    module.begin()
    module.cuda()
    average = WeightAverage(module.graph, 0.9)
    with torch.no_grad():
        for one in module.graph.parameters():
            one.add_(1.0)
    average.update(1)
    wanted = {name: value.cpu().clone() for name, value in average.state.items()}
    module.cpu()
    average.swap()
    found = dict(module.graph.named_parameters())
    for name, value in wanted.items():
        if name in found:
            torch.testing.assert_close(found[name].detach(), value)
