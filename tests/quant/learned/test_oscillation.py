"""Tests of weights that oscillate between two integers, which are counted, frozen or dampened."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chain import noise, settle
from learned_net import INT4, Residual, data, module_of
from torch.nn import functional as F

from qatkit.config.schema import ScheduleConfig
from qatkit.graph.learning import dampening, update_oscillation
from qatkit.graph.quantizers import quantized_weights
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.learned.oscillation import Oscillation
from qatkit.quant.weight_fake_quantize import Quantizers, WeightFakeQuantize
from qatkit.train.learner import make_optimizer
from qatkit.train.module import QATModule


def test_oscillation_counts_turns_and_freezes_at_the_average() -> None:
    """One weight reverses at every step from the third on, one climbs, one stays; computed by hand."""
    follower = Oscillation(torch.zeros(3))
    rows = [[0.0, 0.0, 4.0], [1.0, 1.0, 4.0], [0.0, 2.0, 4.0], [1.0, 3.0, 4.0], [0.0, 4.0, 4.0]]
    frequency, average = 0.0, 0.0
    for index, row in enumerate(rows):
        follower.update(torch.tensor(row), None)
        frequency = 0.99 * frequency + (0.01 if index >= 2 else 0.0)
        average += 0.01 * (row[0] - average)
    np.testing.assert_allclose(follower.frequency, [frequency, 0, 0], rtol=1e-5)
    assert follower.counted("x").oscillating == 1
    follower.update(torch.tensor([1.0, 5.0, 4.0]), 0.02)
    assert follower.frozen.tolist() == [True, False, False]
    assert follower.held(torch.tensor([7.0, 6.0, 3.0])).tolist() == [round(average), 6.0, 3.0]


@pytest.mark.parametrize("weight", [WeightFakeQuantize, LSQWeightFakeQuantize])
def test_a_frozen_integer_stands_in_training_and_in_the_file(weight: type[WeightFakeQuantize]) -> None:
    torch.manual_seed(0)
    wanted = ScheduleConfig(lr=0.5, oscillation="freeze")
    chosen = Quantizers(activation=LSQFakeQuantize, weight=weight)
    module = QATModule(
        settle(Residual(), 3, 12, 12), noise(2, 3, 12, 12), wanted, quantizers=chosen, overrides=INT4
    )
    module.calibrate([noise(32, 3, 12, 12)])
    module.begin()
    held = {}
    for path, operator, fake in quantized_weights(module.graph):
        assert fake.oscillation is not None
        whole = fake.whole(operator.get_parameter("weight"))
        fake.oscillation.update(whole, None)
        fake.oscillation.frozen.view(-1)[::2] = True
        held[path] = whole.view(-1)[::2].clone()
    optimizer = make_optimizer(module.graph, wanted, wanted.lr)
    for images, labels in data():
        module.set_phase(0.9)
        optimizer.zero_grad()
        F.cross_entropy(module(images), labels).backward()
        optimizer.step()
    moved = 0
    module.eval()
    module.ready_to_convert()
    for path, operator, fake in quantized_weights(module.graph):
        operator_weight = operator.get_parameter("weight").detach()
        shipped = fake.integers(operator_weight, None, torch.tensor(1.0)).weight.float().view(-1)
        assert torch.equal(shipped[::2], held[path])
        y, _ = fake(operator_weight)
        scale = fake.scale(operator_weight).view(-1, *[1] * (y.ndim - 1)).expand_as(y).reshape(-1)
        assert torch.equal(y.detach().reshape(-1)[::2], held[path] * scale[::2])
        moved += int((shipped[1::2] != fake.oscillation.whole.float().view(-1)[1::2]).sum())  # type: ignore[union-attr]
    assert moved > 10


@pytest.mark.parametrize("weight", [WeightFakeQuantize, LSQWeightFakeQuantize])
def test_with_learned_scales_nothing_freezes_before_its_norm(weight: type[WeightFakeQuantize]) -> None:
    """While a norm uses batch statistics, integers with a learned scale must not be frozen.

    Frozen ones would ignore the running variance, which would then amplify itself.
    """
    torch.manual_seed(0)
    wanted = ScheduleConfig(lr=0.5, oscillation="freeze", batch_norm="train", freeze_batch_norm=0.5)
    chosen = Quantizers(weight=weight)
    module = QATModule(
        settle(Residual(), 3, 12, 12), noise(2, 3, 12, 12), wanted, quantizers=chosen, overrides=INT4
    )
    module.calibrate([noise(32, 3, 12, 12)])
    module.begin()
    module.train()

    def frozen() -> dict[str, bool]:
        return {path: bool(fake.oscillation is not None and fake.oscillation.frozen.any())
                for path, _, fake in quantized_weights(module.graph)}  # fmt: skip

    for _, _, fake in quantized_weights(module.graph):
        assert fake.oscillation is not None
        fake.oscillation.frequency.fill_(0.5)
    module.set_phase(0.4)  # the norms use the statistics of their batches
    update_oscillation(module.graph, 0.1)
    alive = {
        "stem": True,
        "depthwise": True,
        "project": False,
        "fc": False,
    }  # whether a BatchNorm is folded into the operator
    follows = weight is WeightFakeQuantize
    assert frozen() == {path: follows or not norm for path, norm in alive.items()}
    module.set_phase(0.6)
    update_oscillation(module.graph, 0.1)
    assert all(frozen().values())


def test_dampening_is_the_distance_to_the_middle_of_the_step() -> None:
    module = module_of("lsq", oscillation="dampen")
    module.begin()
    loss = dampening(module.graph)
    loss.backward()
    expected = 0.0
    for _, operator, fake in quantized_weights(module.graph):
        w = operator.get_parameter("weight")
        s = fake.scale(w).double().view(-1, *[1] * (w.ndim - 1)).numpy()
        plain = w.detach().double().numpy()
        end = s * fake.spec.quant_max
        target = np.clip(np.round(plain / s), -fake.spec.quant_max, fake.spec.quant_max) * s
        expected += float(((target - np.clip(plain, -end, end)) ** 2).sum())
        assert w.grad is not None
        gradient = np.where(np.abs(plain) <= end, 2 * (plain - target), 0)
        np.testing.assert_allclose(w.grad, gradient, atol=1e-5)
        assert all(p.grad is None for p in fake.parameters())
    assert loss.item() == pytest.approx(expected, rel=1e-4)
