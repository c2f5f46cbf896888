"""Replaces BatchNorms of other types by torch's own, the only ones that fusing, schedules and the exporter know.

SyncBatchNorm, subclasses of _BatchNorm    replaced if their forward is torch's
custom modules                             with BatchNorm's names of statistics and parameters (such as the frozen ones
                                           of detectors): replaced if they compute the same on random values

The replacement is a BatchNorm2d that accepts inputs of any rank.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from qatkit.quant.qat_layers import with_the_same_parameters

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STATISTICS, _AFFINE = ("running_mean", "running_var"), ("weight", "bias")
_EPS = (1e-5, 0.0, 1e-3, 1e-6)  # tried for modules without an attribute `eps`; detectors have the first two


class BatchNorm(nn.BatchNorm2d):
    """A BatchNorm of inputs of any rank."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's name
        """Accepts any rank."""


def as_batch_norm(module: nn.Module) -> nn.Module | None:
    """Returns the BatchNorm that a module of another type computes.

    Returns None for torch's own BatchNorms and for modules that compute something else.
    """
    if isinstance(module, _BatchNorm):
        same = type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        if not same or isinstance(module, (*_PLAIN, LazyModuleMixin)):
            return None
        return with_the_same_parameters(module, BatchNorm)
    return None if isinstance(module, _NormBase) else _proven(module)


def _proven(module: nn.Module) -> nn.Module | None:
    tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    counts = {tuple(one.shape) for name, one in tensors.items() if name != "num_batches_tracked"}
    if not set(_STATISTICS) <= set(tensors) <= {*_STATISTICS, *_AFFINE, "num_batches_tracked"}:
        return None
    if len(counts) != 1 or len(next(iter(counts))) != 1 or next(module.children(), None) is not None:
        return None
    said = getattr(module, "eps", None)
    for eps in (said,) if isinstance(said, float) else _EPS:
        norm = _with_values_of(module, tensors, eps)
        moves = _moves(module, norm)
        if moves is not None:
            return norm if moves else norm.requires_grad_(False).eval()
    return None


def _with_values_of(module: nn.Module, tensors: dict[str, Tensor], eps: float) -> BatchNorm:
    momentum = getattr(module, "momentum", 0.1)
    norm = BatchNorm(tensors["running_mean"].numel(), eps, momentum if isinstance(momentum, float) else 0.1)
    with torch.no_grad():
        for name in (*_STATISTICS, *_AFFINE):
            if name in tensors:
                getattr(norm, name).copy_(tensors[name])
    for name in _AFFINE:
        getattr(norm, name).requires_grad_(
            isinstance(tensors.get(name), nn.Parameter) and tensors[name].requires_grad
        )
    return norm.train(module.training)


def _moves(module: nn.Module, norm: BatchNorm) -> bool | None:
    """Returns True if a module uses batch statistics in training, as `norm` does, False if it never does.

    Returns None if it computes something else than `norm`. Both run with random parameters and statistics,
    since their own may make them identities.
    """
    pair: list[Any] = [copy.deepcopy(module), copy.deepcopy(norm)]
    generator = torch.Generator().manual_seed(0)
    count = norm.num_features
    with torch.no_grad():
        for name in (*_STATISTICS, *_AFFINE):
            values = 0.5 + torch.rand(count, generator=generator)
            for one in pair:
                if getattr(one, name, None) is not None and (one is pair[0] or hasattr(module, name)):
                    getattr(one, name).copy_(values)
        x = torch.randn(4, count, 3, 5, generator=generator)
        try:
            found = [[one.train(mode)(x.clone()) for mode in (False, True)] for one in pair]
        except Exception:  # a custom forward may raise anything
            return None
    (frozen, alive), (wanted, batch) = found
    if not all(isinstance(one, Tensor) and one.shape == x.shape for one in (frozen, alive)):
        return None
    if not torch.allclose(frozen, wanted, rtol=1e-5, atol=1e-5):
        return None
    if torch.allclose(alive, wanted, rtol=1e-5, atol=1e-5):
        return False
    return True if torch.allclose(alive, batch, rtol=1e-5, atol=1e-5) else None
