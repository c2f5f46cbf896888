"""BatchNorm over the batches of all ranks, on any device: torch.nn.SyncBatchNorm has kernels for GPUs alone.

Each rank's mean, variance and count are gathered and put together (Chan, Golub and LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances", 1979), so nothing cancels as in E[x²] - E[x]². Backward, as of one
device with the summed batch (Ioffe and Szegedy, "Batch normalization", 2015, section 3):

    dx = w/σ · (dy - mean(dy) - x̂·mean(dy·x̂))        means over all ranks

The modules stay what they are: types, names and state are those that every pass and checkpoint knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qatkit.observers.base import in_one_process


class _Normalize(torch.autograd.Function):
    """(x - mean)/σ·weight + bias [N, C, ...]; mean and variance [C] of all ranks, `count` values in all."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, count: Tensor
    ) -> Tensor:
        normal = (x - _along(mean, x)) * _along(inverse, x)
        ctx.save_for_backward(normal, weight, inverse, count)
        return normal * _along(weight, x) + _along(bias, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        (dy,), (normal, weight, inverse, count) = grads, ctx.saved_tensors
        others = [d for d in range(dy.ndim) if d != 1]
        bias_grad, weight_grad = dy.sum(others), (dy * normal).sum(others)
        sums = torch.stack([bias_grad, weight_grad])
        torch.distributed.all_reduce(sums)
        means = sums / count
        dx = dy - _along(means[0], dy) - normal * _along(means[1], dy)
        return dx * _along(weight * inverse, dy), weight_grad, bias_grad, None, None, None


def _along(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))


@torch.no_grad()
def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance [C], and the number of values [], over all ranks."""
    variance, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
    own = torch.stack([mean, variance, torch.full_like(mean, x.numel() // x.shape[1])])
    every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, own)
    means, variances, counts = torch.stack(every).unbind(1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, variance, total[0]


def _forward(norm: _BatchNorm, x: Tensor) -> Tensor:
    """In place of `norm.forward`."""
    if not norm.training or in_one_process():
        return type(norm).forward(norm, x)
    norm._check_input_dim(x)
    given, x = x.dtype, x.float()
    mean, variance, count = _statistics(x)
    if norm.track_running_stats:
        _follow(norm, mean, variance * (count / (count - 1)))
    weight = torch.ones_like(mean) if norm.weight is None else norm.weight
    bias = torch.zeros_like(mean) if norm.bias is None else norm.bias
    apply: Any = _Normalize.apply
    return cast(Tensor, apply(x, weight, bias, mean, torch.rsqrt(variance + norm.eps), count)).to(given)


@torch.no_grad()
def _follow(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    share = norm.momentum if norm.momentum is not None else 1 / norm.num_batches_tracked
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        cast(Tensor, running).mul_(1 - share).add_(new * share)


@contextmanager
def synchronized(model: nn.Module | None) -> Iterator[None]:
    """Within, every BatchNorm of `model` that trains normalizes by the statistics of all ranks; of None nothing.

    One with a forward of its own is left as it is.
    """
    found = [m for m in (model.modules() if model else ()) if _is_plain(m)]
    for norm in found:
        norm.forward = partial(_forward, norm)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for norm in found:
            del norm.forward


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward
