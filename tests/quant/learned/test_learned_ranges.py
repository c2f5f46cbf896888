"""Tests of initial values and limits of learned scales.

They cover channels of zeros, a weight that two layers quantize differently, and signed activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from chain import noise, run_torch, settle
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.graph.learning import idle, learners
from qatkit.graph.quantizers import quantized_weights
from qatkit.quant.backends import FBGEMM, QNNPACK, TENSORRT, Backend
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.granularity import PerChannel
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.learned.lsq_plus import LSQPlusFakeQuantize
from qatkit.quant.learned.pact import PACTFakeQuantize
from qatkit.quant.observers import MovingAverageMinMaxObserver, MSEObserver, Observer
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.train.learner import make_optimizer
from qatkit.train.module import QATModule

LSQ = Quantizers(activation=LSQFakeQuantize, weight=LSQWeightFakeQuantize)


class Small(nn.Module):
    """A convolution, a ReLU and a head: [N, 3, 8, 8] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(torch.relu(self.conv(x)).mean((2, 3)))
        return result


class Tied(nn.Module):
    """Two Linears that share one weight: [N, 16] to [N, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.relu(self.a(x)))
        return result


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_a_head_of_zeros_learns(granularity: str) -> None:
    """Some models start with a head of zeros; a scale near zero would clip it and pass no gradient."""
    torch.manual_seed(0)
    model = settle(Small(), 3, 8, 8)
    with torch.no_grad():
        model.get_parameter("fc.weight").zero_()
    wanted = ScheduleConfig(lr=0.3, optimizer="sgd", batch_norm="freeze")
    override = {"fc": OverrideConfig(weight_granularity=granularity)}
    module = QATModule(model, noise(2, 3, 8, 8), wanted, quantizers=LSQ, overrides=override)
    labels = torch.arange(64) % 4
    images = noise(64, 3, 8, 8) + labels.view(-1, 1, 1, 1)
    module.calibrate([images])
    module.begin()
    module.train()
    optimizer = make_optimizer(module.graph, wanted, wanted.lr)
    for step in range(150):
        module.set_phase(step / 150)
        optimizer.zero_grad()
        F.cross_entropy(module(images), labels).backward()
        optimizer.step()
    module.eval()
    module.ready_to_convert()
    assert F.cross_entropy(module(images), labels) < 1.0  # zeros would give log 4 = 1.39


def test_channels_that_begin_at_nothing_follow_their_weights() -> None:
    fake = LSQWeightFakeQuantize(QuantSpec("int8", symmetric=True, granularity=PerChannel(0)), (5, 3, 2, 2))
    weight = noise(5, 3, 2, 2)
    weight[1], weight[4] = 0.0, 1e-9
    fake.begin(weight)
    trained = noise(5, 3, 2, 2, seed=1)
    wanted = np.where(
        [False, True, False, False, True],
        np.abs(trained.numpy()).reshape(5, -1).max(1) / 127,
        np.abs(weight.numpy()).reshape(5, -1).max(1) / 127,
    )
    np.testing.assert_allclose(fake.wanted_scale(trained), wanted, rtol=1e-6)
    again = LSQWeightFakeQuantize(fake.spec, weight.shape)
    again.load_state_dict(fake.state_dict())
    np.testing.assert_array_equal(again.wanted_scale(trained), fake.wanted_scale(trained))
    # The largest weight is at the limit of the range, where a learned scale passes no gradient.
    trained.requires_grad_()
    fake.set_phase(quantize=True, observe=False)
    fake(trained)[0].sum().backward()
    assert trained.grad is not None
    np.testing.assert_array_equal(trained.grad[[1, 4]], 1.0)


class Residual(nn.Module):
    """A residual branch whose last BatchNorm starts at 0, as with `zero_init_residual`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        logits: Tensor = self.fc(torch.relu(x + self.bn(self.conv(x))).mean((2, 3)))
        return logits


@pytest.mark.parametrize("dead", [4, 8])
@pytest.mark.parametrize("batch_norm", ["train", "freeze"])
@pytest.mark.parametrize("quantizers", [Quantizers(), LSQ], ids=["follow", "learned"])
@pytest.mark.parametrize("observer", [MovingAverageMinMaxObserver, MSEObserver])
def test_a_branch_that_begins_at_zero_trains(
    observer: Callable[[], Observer], quantizers: Quantizers, batch_norm: str, dead: int
) -> None:
    """Covers an observer that follows training and one whose ranges stay as calibrated."""
    quantizers = replace(quantizers, observer=observer)
    torch.manual_seed(0)
    model = settle(Residual(), 3, 8, 8)
    with torch.no_grad():
        model.get_parameter("bn.weight")[:dead] = 0.0
        model.get_parameter("bn.bias")[:dead] = 0.0
    wanted = ScheduleConfig(lr=0.05, optimizer="sgd", batch_norm=batch_norm, freeze_batch_norm=1.0)
    module = QATModule(model, noise(2, 3, 8, 8), wanted, quantizers=quantizers)
    labels = torch.arange(64) % 4
    images = noise(64, 3, 8, 8) + 0.3 * labels.view(-1, 1, 1, 1)
    module.calibrate([images])
    module.begin()
    module.train()
    optimizer = make_optimizer(module.graph, wanted, wanted.lr)
    for step in range(100):
        module.set_phase(step / 100)
        optimizer.zero_grad()
        F.cross_entropy(module(images), labels).backward()
        optimizer.step()
    module.eval()
    module.ready_to_convert()
    conv = module.graph.get_submodule("conv")
    assert isinstance(conv, QATOperator)
    ships = conv.quantized(*conv.effective())[0].flatten(1).abs().amax(1)
    assert (ships[:dead] > 1e-4).all(), ships
    scale = float(module.graph.get_submodule("conv_quant").get_buffer("scale"))
    assert 1e-3 < scale < 1, scale
    again = QATModule(model, noise(2, 3, 8, 8), wanted, quantizers=quantizers)  # as in a resumed run
    again.load_state_dict(module.state_dict())
    again.eval()
    again.ready_to_convert()
    np.testing.assert_array_equal(run_torch(again, images), run_torch(module, images))


@pytest.mark.parametrize("path", ["a", "b"])
@pytest.mark.parametrize(
    "override", [OverrideConfig(weight_dtype="int4"), OverrideConfig(weight_granularity="per_tensor")]
)
def test_a_weight_quantized_in_two_ways_has_two_learned_scales(path: str, override: OverrideConfig) -> None:
    images = noise(32, 16)
    steps = {}
    for name, chosen in (("follows", Quantizers()), ("learned", LSQ)):
        torch.manual_seed(0)
        module = QATModule(Tied().eval(), images[:2], quantizers=chosen, overrides={path: override})
        module.calibrate([images])
        module.begin()
        steps[name] = {where: fake.wanted_scale(op.get_parameter("weight")).detach()
                       for where, op, fake in quantized_weights(module.graph)}  # fmt: skip
    for where, wanted in steps["follows"].items():
        torch.testing.assert_close(steps["learned"][where], wanted, rtol=1e-6, atol=0)


def test_a_quantizer_that_finds_nothing_to_learn_says_so() -> None:
    """TensorRT's activations are symmetric, but PACT only learns ranges that begin at zero."""
    images = noise(8, 3, 8, 8)

    def told(kind: type[FakeQuantize], backend: Backend) -> str:
        module = QATModule(
            settle(Small(), 3, 8, 8), images[:2], None, backend, quantizers=Quantizers(activation=kind)
        )
        module.calibrate([images])
        module.begin()
        return idle(module.graph)

    said = told(PACTFakeQuantize, TENSORRT)
    assert "PACTFakeQuantize learns no range of this model" in said and "quantizer=lsq" in said
    assert not told(PACTFakeQuantize, FBGEMM)
    assert not told(LSQFakeQuantize, TENSORRT)
    assert not told(FakeQuantize, TENSORRT)


@pytest.mark.parametrize("backend", [FBGEMM, QNNPACK], ids=lambda one: one.name)
@pytest.mark.parametrize("kind", [LSQFakeQuantize, LSQPlusFakeQuantize, PACTFakeQuantize])
def test_conversion_keeps_the_trained_model_for_all_activations(
    kind: type[FakeQuantize], backend: Backend
) -> None:
    torch.manual_seed(0)
    model = settle(Small(), 3, 8, 8)
    images = noise(64, 3, 8, 8)
    module = QATModule(
        model, images[:2], ScheduleConfig(lr=0.1), backend, quantizers=Quantizers(activation=kind)
    )
    module.calibrate([images])
    module.begin()
    module.train()
    optimizer = make_optimizer(module.graph, module.schedule, 0.1)
    for step in range(4):
        module.set_phase(step / 4)
        optimizer.zero_grad()
        F.cross_entropy(module(images), torch.arange(64) % 4).backward()
        optimizer.step()
    module.eval()
    module.ready_to_convert()
    assert learners(module.graph)
    simulated, expected = run_torch(module, images), run_torch(module.convert().graph, images)
    np.testing.assert_allclose(simulated, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    exact = run_torch(model, images)
    before = QATModule(model, images[:2], None, backend, quantizers=Quantizers(activation=kind))
    before.calibrate([images])
    before.begin()
    before.eval()
    before.ready_to_convert()
    assert np.abs(run_torch(before, images) - exact).mean() < 0.02 * np.abs(exact).mean()
