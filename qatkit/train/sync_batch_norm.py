"""BatchNorm over the batches of all ranks, on any device (torch.nn.SyncBatchNorm only has kernels for GPUs).

Each rank's mean, variance and count are gathered and combined (Chan, Golub and LeVeque, "Updating formulae
and a pairwise algorithm for computing sample variances", 1979), which avoids the cancellation in E[x²] -
E[x]². The backward pass is that of one device with the joined batch (Ioffe and Szegedy, "Batch
normalization", 2015, section 3):

    dx = w/σ · (dy - mean(dy) - x̂·mean(dy·x̂))        means over all ranks

The modules are not replaced, so that passes and checkpoints find the usual types, names and state.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from qatkit.quant.observers.base import in_one_process
from qatkit.warning import warn


class _Normalize(torch.autograd.Function):
    """The function (x - mean)/σ·weight + bias [N, C, ...], with mean and variance [C] of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, count: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse, count)
        # Computed in the order of torch's kernel for one process, because a different rounding could move a
        # value to another integer.
        slope = inverse * weight
        return torch.addcmul(_along(torch.addcmul(bias, mean, slope, value=-1), x), x, _along(slope, x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight, mean, inverse, count) = grads, ctx.saved_tensors
        others, centred = _others(x), x - _along(mean, x)
        own = torch.stack([dy.sum(others, dtype=_exact(x)), (dy * centred).sum(others, dtype=_exact(x))])
        bias_grad, weight_grad = own[0].to(dy.dtype), (own[1] * inverse).to(dy.dtype)
        torch.distributed.all_reduce(own)
        means = (own / count).to(dy.dtype)
        dx = dy - centred * _along(means[1] * inverse.square(), dy) - _along(means[0], dy)
        return dx * _along(weight * inverse, dy), weight_grad, bias_grad, None, None, None


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _exact(x: Tensor) -> torch.dtype:
    """Returns the type for sums over images; on the CPU it makes the sums independent of the split over ranks."""
    return torch.float64 if x.device.type == "cpu" else x.dtype


def _along(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))


@torch.no_grad()
def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean and biased variance [C] and the number of values [] over all ranks, in the type of `_exact`."""
    count = x.numel() // x.shape[1]
    mean = x.sum(_others(x), dtype=_exact(x)) / count
    variance = (x - _along(mean, x)).square().sum(_others(x)) / count
    own = torch.stack([mean, variance, torch.full_like(mean, count)])
    every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(every, own)
    means, variances, counts = torch.stack(every).unbind(1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, variance, total[0]


def _forward(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Replaces `norm.forward` for types that do not override forward."""
    if not norm.training or in_one_process():
        return type(norm).forward(norm, x)
    norm._check_input_dim(x)
    if not norm.track_running_stats:
        return _normalized(x, None, None, norm.weight, norm.bias, None, norm.eps)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    share = norm.momentum if norm.momentum is not None else 1 / norm.num_batches_tracked
    return _normalized(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, share, norm.eps)


def _own_forward(norm: _BatchNorm, *given: Any, **named: Any) -> Any:
    """Replaces an overridden forward (such as timm's, which calls an activation): its F.batch_norm uses all ranks."""
    own = type(norm).forward
    if not norm.training or in_one_process():
        return own(norm, *given, **named)
    with _OfAllRanks() as mode:
        result = own(norm, *given, **named)
    if not mode.called:
        warn(
            f"{type(norm).__name__} computes its statistics without torch.nn.functional.batch_norm, so each process"
            " uses only its own samples"
        )
    return result


class _OfAllRanks(TorchFunctionMode):
    """A mode in which `F.batch_norm` in training normalizes by the statistics of all ranks."""

    called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.called = True
        given = inspect.signature(F.batch_norm).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        x, mean, variance, weight, bias, training, momentum, eps = given.args
        if not training:
            return func(*args, **(kwargs or {}))
        return _normalized(x, mean, variance, weight, bias, momentum, eps)


def _normalized(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    share: float | Tensor | None,
    eps: float,
) -> Tensor:
    """Computes `F.batch_norm` in training over the batches of all ranks."""
    given, x = x.dtype, x.float()
    mean, variance, count = _statistics(x)
    if running_mean is not None and running_var is not None and share is not None:
        _follow((running_mean, running_var), (mean, variance * (count / (count - 1))), share)
    mean, inverse = mean.to(x.dtype), torch.rsqrt(variance + eps).to(x.dtype)
    weight = torch.ones_like(mean) if weight is None else weight
    bias = torch.zeros_like(mean) if bias is None else bias
    apply: Any = _Normalize.apply
    return cast(Tensor, apply(x, weight, bias, mean, inverse, count)).to(given)


@torch.no_grad()
def _follow(running: tuple[Tensor, ...], seen: tuple[Tensor, ...], share: float | Tensor) -> None:
    for old, new in zip(running, seen, strict=True):
        old.mul_(1 - share).add_(new * share)


@contextmanager
def synchronized(model: nn.Module | None) -> Iterator[None]:
    """Within the context, training BatchNorms of `model` use the statistics of all ranks; None changes nothing.

    A BatchNorm whose own forward does not use F.batch_norm uses the statistics of its process, with a warning.
    """
    found = [m for m in (model.modules() if model else ()) if isinstance(m, _BatchNorm)]
    found = [norm for norm in found if not isinstance(norm, nn.SyncBatchNorm)]  # synchronizes by itself
    for norm in found:
        plain = type(norm).forward is _BatchNorm.forward
        norm.forward = partial(_forward if plain else _own_forward, norm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in found:
            del norm.forward
