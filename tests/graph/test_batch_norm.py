"""Tests of re-estimated BatchNorm statistics, against torch's `update_bn` and by their effect."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from chain import noise, settle
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.graph.batch_norm import kept_norms, reestimate
from qatkit.graph.learning import update_oscillation
from qatkit.graph.phase import set_phase
from qatkit.graph.quantizers import inference_weight, quantized_weights
from qatkit.quant.granularity import along
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.train.module import QATModule


class Net(nn.Module):
    """A convolution, a depthwise one and a Linear, each with a BatchNorm: [N, 3, 8, 8] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.depth, self.bn2 = nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8)
        self.fc, self.bn3 = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.depth(x))).mean((2, 3))
        return cast(Tensor, self.bn3(self.fc(x)))


BATCHES = [2 * noise(count, 3, 8, 8, seed=seed) + 0.5 for seed, count in enumerate((16, 16, 16))]


def _prepared(batch_norm: str) -> tuple[nn.Module, QATModule]:
    model = settle(Net(), 3, 8, 8)
    module = QATModule(model, BATCHES[0], ScheduleConfig(batch_norm=batch_norm))
    module.calibrate(BATCHES)
    return model, module


def _norms(module: QATModule) -> list[nn.BatchNorm2d]:
    return cast("list[nn.BatchNorm2d]", kept_norms(module.graph))


@pytest.mark.parametrize("batch_norm", ["freeze", "train"])
def test_in_float_they_are_those_of_update_bn(batch_norm: str) -> None:
    model, module = _prepared(batch_norm)
    found = _norms(module)
    before = {name: value.clone() for name, value in module.graph.named_parameters()}
    momenta = [norm.momentum for norm in found]
    modes = [m.training for m in module.graph.modules()]
    assert reestimate(module.graph, [(batch,) for batch in BATCHES], quantize=False) == 3
    update_bn(BATCHES, model)
    for norm, wanted in zip(
        found, cast("list[nn.BatchNorm2d]", [model.bn1, model.bn2, model.bn3]), strict=True
    ):
        torch.testing.assert_close(norm.running_mean, wanted.running_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.running_var, wanted.running_var, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in module.graph.named_parameters())
    assert [norm.momentum for norm in found] == momenta
    assert [m.training for m in module.graph.modules()] == modes


def test_batches_count_by_their_images() -> None:
    _, module = _prepared("train")
    first = _norms(module)[0]
    batches = [noise(30, 3, 8, 8, seed=5), 3 * noise(2, 3, 8, 8, seed=6)]
    seen = list[Tensor]()
    handle = first.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    reestimate(module.graph, [(batch,) for batch in batches], quantize=True)
    handle.remove()
    means = torch.stack([one.mean((0, 2, 3)) for one in seen])
    weights = torch.tensor([30.0, 2.0]) / 32
    torch.testing.assert_close(first.running_mean, weights @ means)
    variances = torch.stack([one.var((0, 2, 3)) for one in seen])
    torch.testing.assert_close(first.running_var, weights @ variances)


def test_with_quantization_what_ships_is_normalised_again() -> None:
    """Re-estimation corrects very wrong statistics: the converted model's logits have the mean β and the
    standard deviation γ of the last norm again.
    """
    _, module = _prepared("train")
    for norm in _norms(module):
        norm.get_buffer("running_mean").add_(0.3)
        norm.get_buffer("running_var").mul_(2.0)
    module.eval()
    set_phase(module.graph, observe=False, quantize=True)
    wrong = torch.cat([module(batch) for batch in BATCHES]).std(0)
    assert module.reestimate(BATCHES) == 3
    module.ready_to_convert()
    logits = torch.cat([module.convert().graph(batch) for batch in BATCHES])
    last = _norms(module)[-1]
    torch.testing.assert_close(logits.mean(0), last.bias, rtol=0, atol=0.1)
    torch.testing.assert_close(logits.std(0), last.weight.abs(), rtol=0.15, atol=0.0)
    assert not torch.allclose(wrong, last.weight.abs(), rtol=0.15)


@pytest.mark.parametrize("batch_norm", ["freeze", "train"])
@pytest.mark.parametrize("oscillation", ["ignore", "freeze"])
def test_learned_scales_keep_integers_when_the_deviation_moves(batch_norm: str, oscillation: str) -> None:
    """Multiplies the running variances by 0.2 to 9 after calibration.

    Re-estimation must keep nearly all converted integers, so that only the normalization changes.
    """
    quantizers = Quantizers(weight=LSQWeightFakeQuantize, activation=LSQFakeQuantize)
    schedule = ScheduleConfig(batch_norm=batch_norm, oscillation=oscillation)
    overrides = {"*": OverrideConfig(weight_dtype="int4")}
    module = QATModule(
        settle(Net(), 3, 8, 8), BATCHES[0], schedule, overrides=overrides, quantizers=quantizers
    )
    module.calibrate(BATCHES)
    for norm in _norms(module):
        norm.get_buffer("running_var").mul_(torch.linspace(0.2, 9, norm.num_features))
    module.begin()
    if oscillation == "freeze":
        module.train()
        for _ in range(3):
            update_oscillation(module.graph, -1.0)  # everything counts as oscillating
    module.eval()
    module.ready_to_convert()
    before = _integers(module)
    assert module.reestimate(BATCHES) == 3
    after = _integers(module)
    assert before.keys() == after.keys() and len(before) == 3
    for name, integers in before.items():
        moved = (integers - after[name]).abs()  # the alignment of the new scales raises them slightly
        assert moved.max() <= 1 and (moved > 0).float().mean() < 0.05, name
        assert integers.unique().numel() > 4


@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_algorithm_integers_stay_when_the_deviation_moves(granularity: str) -> None:
    """A per-tensor scale can only follow a common factor, so all deviations change alike in that case."""
    per_channel = granularity == "per_channel"
    overrides = {"*": OverrideConfig(weight_dtype="int4", weight_granularity=granularity)}
    module = QATModule(
        settle(Net(), 3, 8, 8), BATCHES[0], ScheduleConfig(batch_norm="freeze"), overrides=overrides
    )
    module.calibrate(BATCHES)
    for norm in _norms(module):
        norm.get_buffer("running_var").mul_(torch.linspace(0.2, 9, norm.num_features) if per_channel else 4.0)
    for _, operator, fake in quantized_weights(module.graph):
        weight = inference_weight(operator, fake).detach()
        scale = fake.scale(weight)
        steps = weight / along(scale, 0, weight.ndim)  # integers for the largest weights
        up = steps - steps.floor() > 0.5 + 0.3 * noise(*weight.shape).clamp(-1, 1)
        fake.fix(scale, weight, steps.floor() + up)
    module.eval()
    module.ready_to_convert()
    before = _integers(module)
    assert module.reestimate(BATCHES) == 3
    for name, integers in _integers(module).items():
        off = (integers - before[name]).abs()
        assert not off.any() if per_channel else (off > 1).float().mean() < 0.05, name


def _integers(module: QATModule) -> dict[str, Tensor]:
    found = {}
    for path, operator, fake in quantized_weights(module.graph):
        weight = inference_weight(operator, fake)
        found[path] = fake.whole(weight)
    return found


def test_no_batches_are_no_reestimation() -> None:
    _, module = _prepared("train")
    assert module.reestimate([]) == 0
