"""Checks that other implementations of BatchNorm are fused and follow `schedule.batch_norm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from chain import noise
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qatkit.config.schema import ScheduleConfig
from qatkit.graph.norms import as_batch_norm
from qatkit.graph.phase import set_phase
from qatkit.train.module import QATModule


class WithoutRank(_BatchNorm):
    """A BatchNorm for inputs of several ranks."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's name
        assert input.ndim > 1


class Checked(WithoutRank):
    """A subclass of a subclass of BatchNorm."""


class Frozen(nn.Module):
    """The frozen BatchNorm of detection libraries: one multiplication and one addition."""

    def __init__(self, count: int, eps: float | None = 1e-3) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(count) + 0.5)
        if eps is not None:
            self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        tensors = cast(Any, self)
        scale = tensors.weight * (tensors.running_var + getattr(self, "eps", 0.0)).rsqrt()
        shift = tensors.bias - tensors.running_mean * scale
        return cast(Tensor, x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1))


class Written(nn.Module):
    """A BatchNorm written as arithmetic, including its training."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(count) + 0.5), nn.Parameter(torch.rand(count))
        self.register_buffer("running_mean", torch.rand(count))
        self.register_buffer("running_var", torch.rand(count) + 0.5)
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        mean, var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        if self.training:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            with torch.no_grad():
                cast(Tensor, self.running_mean).lerp_(mean, 0.1)
                cast(Tensor, self.running_var).lerp_(var * x[:, 0].numel() / (x[:, 0].numel() - 1), 0.1)
        shaped = [one[:, None, None] for one in (mean, var, self.weight, self.bias)]
        return (x - shaped[0]) / (shaped[1] + self.eps).sqrt() * shaped[2] + shaped[3]


class Other(Frozen):
    """A module with the tensors of a BatchNorm that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        tensors = cast(Any, self)
        return cast(
            Tensor, x * tensors.running_var.reshape(1, -1, 1, 1) - tensors.running_mean.reshape(1, -1, 1, 1)
        )


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "SyncBatchNorm": nn.SyncBatchNorm,
    "a class without a rank": WithoutRank,
    "derived from it": Checked,
    "frozen": Frozen,
    "frozen, without eps": lambda count: Frozen(count, None),
    "written out": Written,
}
FROZEN = [name for name in NORMS if name.startswith("frozen")]


def net(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        for name, buffer in model[1].named_buffers():
            if name.startswith("running"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model.eval()


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("batch_norm", ["fold", "freeze"])
def test_it_is_fused_into_the_convolution(name: str, batch_norm: Any) -> None:
    model, x = net(NORMS[name]), noise(4, 3, 9, 9)
    module = QATModule(model, x[:2], ScheduleConfig(batch_norm=batch_norm), quantize=False)
    assert not [n for n in module.graph.graph.nodes if "norm" in str(n.target).lower() or n.target == "1"]
    set_phase(module.graph, observe=False, quantize=False)
    with torch.no_grad():
        torch.testing.assert_close(module.graph.eval()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in NORMS if name not in FROZEN])
def test_it_trains_as_torchs_own(name: str) -> None:
    """With batch_norm=train, all implementations use batch statistics and equal a BatchNorm2d bit for bit."""
    x, found = noise(16, 3, 9, 9), []
    for norm in (NORMS[name], nn.BatchNorm2d):
        model = net(norm)
        if norm is nn.BatchNorm2d:
            model.load_state_dict(net(NORMS[name]).state_dict(), strict=False)
        module = QATModule(model, x[:2], ScheduleConfig(batch_norm="train"), quantize=False)
        module.calibrate([x])
        found.append(module.graph.train()(x).detach())
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("rank", [1, 3])
def test_inputs_of_other_ranks(rank: int) -> None:
    torch.manual_seed(0)
    kind: Any = nn.Conv1d if rank == 1 else nn.Conv3d
    alone = nn.Sequential(WithoutRank(3), kind(3, 8, 3), WithoutRank(8)).eval()
    x = noise(4, 3, *[7] * rank)
    module = QATModule(alone, x[:2], quantize=False)
    set_phase(module.graph, observe=False, quantize=False)
    with torch.no_grad():
        torch.testing.assert_close(module.graph.eval()(x), alone(x), rtol=1e-4, atol=1e-5)


def test_another_function_by_the_same_names_stays() -> None:
    assert as_batch_norm(Other(8)) is None
    assert (
        as_batch_norm(nn.BatchNorm2d(8)) is None and as_batch_norm(nn.InstanceNorm2d(8, affine=True)) is None
    )
    model, x = net(Other), noise(4, 3, 9, 9)
    module = QATModule(model, x[:2], quantize=False)
    with torch.no_grad():
        torch.testing.assert_close(module.graph.eval()(x), model(x), rtol=1e-4, atol=1e-5)


def test_what_is_frozen_does_not_train() -> None:
    found = as_batch_norm(Frozen(8))
    assert isinstance(found, nn.BatchNorm2d)
    assert not found.training and not any(p.requires_grad for p in found.parameters())
