"""Tests of optimizers that update learned quantizer parameters by relative steps.

Learned parameters are updated by Adam on their logarithms. With `schedule.relative_lr`, weights are updated by
Adam in units of their channel's root mean square; otherwise by torch's optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from chain import noise
from torch import Tensor, nn

from qatkit.config.schema import ScheduleConfig
from qatkit.quant.learned.by_shares import BY_SHARES, RELATIVE, AdamWAndScales, SGDAndScales
from qatkit.train.learner import make_optimizer

STEPS, RATE, DECAY = 12, 0.02, 0.1
KINDS = [(SGDAndScales, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
         (AdamWAndScales, torch.optim.AdamW, {"lr": 0.1, "fused": True})]  # fmt: skip


def _loss(weight: Tensor, scales: Sequence[Tensor]) -> Tensor:
    """Returns a loss whose gradients differ widely in size, for scales that differ widely in size."""
    near = (weight - 1).square().sum()
    return near + 1e-9 * (scales[0] * weight.detach()).sum().square() + 1e3 * (scales[1] - 1e-4).square()


def _start() -> tuple[nn.Parameter, list[nn.Parameter]]:
    return nn.Parameter(noise(5)), [
        nn.Parameter(noise(5, seed=1).abs() + 0.1),
        nn.Parameter(torch.tensor(3e-3)),
    ]


def _groups(weight: Tensor, scales: list[nn.Parameter]) -> list[dict[str, Any]]:
    shared = {"lr": RATE, BY_SHARES: True}
    return [{"params": [weight]}, {"params": scales[:1], **shared, "weight_decay": 0.0},
            {"params": scales[1:], **shared, "weight_decay": DECAY}]  # fmt: skip


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(("kind", "plain", "settings"), KINDS)
def test_it_is_adam_on_logarithms(kind: Any, plain: Any, settings: dict[str, Any]) -> None:
    (weight, scales), (other, starts) = _start(), _start()
    logs = [nn.Parameter(one.detach().double().log()) for one in starts]
    optimizer, of_weight = kind(_groups(weight, scales), **settings), plain([other], **settings)
    of_logs = torch.optim.Adam(logs, lr=RATE, eps=1e-16)
    for _ in range(STEPS):
        _step(optimizer, _loss(weight, scales))
        values = [one.exp() for one in logs]
        loss = _loss(other, values) + DECAY / 2 * values[1].square()
        of_weight.zero_grad()
        _step(of_logs, loss)
        of_weight.step()
    for found, wanted, start in zip(scales, logs, _start()[1], strict=True):
        torch.testing.assert_close(found.detach().double(), wanted.detach().exp(), rtol=1e-4, atol=0)
        assert (found / start).log().abs().max() > 4 * RATE  # relative to its own size
    assert torch.equal(weight, other)


@pytest.mark.parametrize(("kind", "plain", "settings"), KINDS)
def test_a_stored_state_goes_on_to_the_last_bit(kind: Any, plain: Any, settings: dict[str, Any]) -> None:
    weight, scales = _start()
    optimizer = kind(_groups(weight, scales), **settings)
    for step in range(STEPS):
        if step == STEPS // 2:
            again = [nn.Parameter(one.detach().clone()) for one in (weight, *scales)]
            resumed = kind(_groups(again[0], again[1:]), **settings)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _step(optimizer, _loss(weight, scales))
        if step >= STEPS // 2:
            _step(resumed, _loss(again[0], again[1:]))
    assert all(torch.equal(a, b) for a, b in zip((weight, *scales), again, strict=True))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_without_learned_scales_the_optimizer_is_torchs(name: str) -> None:
    optimizer = make_optimizer(nn.Linear(3, 3), ScheduleConfig(optimizer=name), 0.1)
    assert type(optimizer).__module__.startswith("torch.optim")


@pytest.mark.parametrize(("kind", "_", "settings"), KINDS)
def test_a_resumed_step_is_taken_on_the_device_of_the_scales(
    kind: Any, _: Any, settings: dict[str, Any]
) -> None:
    """The device meta, whose tensors no kernel combines with the CPU's, replaces a second real device."""
    weight, scales = _start()
    optimizer = kind(_groups(weight, scales), **settings)
    _step(optimizer, _loss(weight, scales))
    there, others = (nn.Parameter(one.detach().to("meta")) for one in (weight, scales[0])), scales
    weight, *scales = *there, nn.Parameter(others[1].detach().to("meta"))
    resumed = kind(_groups(weight, scales), **settings)
    resumed.load_state_dict(optimizer.state_dict())
    for one in (weight, *scales):
        one.grad = torch.zeros_like(one)
    resumed.step()
    found = {name: value.device.type for one in scales for name, value in resumed.state[one].items()}
    assert found == {"step": "meta", "mean": "meta", "square": "meta"}


def _relative(*values: nn.Parameter, decay: float = 0.0) -> torch.optim.Optimizer:
    return AdamWAndScales([{"params": list(values), RELATIVE: True, "weight_decay": decay}], lr=RATE)


def test_relative_steps_are_adams_in_units_of_the_channels() -> None:
    weight, bias = (
        nn.Parameter(noise(4, 3) * torch.tensor([[1.0], [1e3], [1e-4], [0.0]])),
        nn.Parameter(noise(4)),
    )
    start, moment, square = weight.detach().double(), torch.zeros(4, 3), torch.zeros(4, 3)
    wanted, first = start.clone(), bias.detach().clone()
    optimizer = _relative(weight, bias, decay=DECAY)
    for step in range(1, STEPS + 1):
        _step(optimizer, (weight * noise(4, 3, seed=step)).sum() + bias.sum())
        unit = wanted.square().mean(1, keepdim=True).sqrt()
        gradient = unit * noise(4, 3, seed=step).double()
        moment, square = 0.9 * moment + 0.1 * gradient, 0.999 * square + 0.001 * gradient.square()
        moved = (moment / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-16)
        wanted = (1 - RATE * DECAY) * wanted - RATE * unit * moved
    torch.testing.assert_close(weight.detach().double(), wanted, rtol=1e-4, atol=0)
    assert (weight[:3] / start[:3] - 1).abs().mean(1).min() > RATE  # independent of the size of the channel
    assert not weight[3].any()
    assert ((bias - first) / first.square().mean().sqrt()).abs().max() < 2 * STEPS * RATE


def test_relative_steps_do_not_depend_on_the_size_of_a_channel() -> None:
    sizes = torch.tensor([[1.0], [2.0**10], [2.0**-12]])
    weight, scaled = nn.Parameter(noise(3, 5)), nn.Parameter(noise(3, 5) * sizes)
    for one, unit in ((weight, 1.0), (scaled, sizes)):
        optimizer = _relative(one)
        for _ in range(STEPS):
            _step(optimizer, (one / unit - 1).square().sum())
    torch.testing.assert_close(scaled.detach() / sizes, weight.detach(), rtol=1e-5, atol=0)


def test_stored_relative_steps_go_on_to_the_last_bit() -> None:
    weight = nn.Parameter(noise(3, 5))
    optimizer = _relative(weight, decay=DECAY)
    for step in range(STEPS):
        if step == STEPS // 2:
            again = nn.Parameter(weight.detach().clone())
            resumed = _relative(again, decay=DECAY)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _step(optimizer, (weight - 1).square().sum())
        if step >= STEPS // 2:
            _step(resumed, (again - 1).square().sum())
    assert torch.equal(weight, again)


def test_the_schedule_asks_for_relative_steps() -> None:
    model = nn.Linear(3, 3)
    optimizer = make_optimizer(
        model, ScheduleConfig(optimizer="adamw", relative_lr=True, weight_decay=0.0), RATE
    )
    before = model.weight.detach().clone()
    _step(optimizer, model(torch.ones(1, 3)).sum())
    moved = (before - model.weight).detach() / before.square().mean(1, keepdim=True).sqrt()
    torch.testing.assert_close(moved, torch.full((3, 3), RATE), rtol=1e-4, atol=0)
