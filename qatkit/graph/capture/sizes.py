"""Draws outputs whose values are never read, instead of computing them.

While a graph is recorded or its shapes are computed, reading values that depend on the input is rejected. Convolutions
and Linears, which take nearly all the time of such a run, therefore need not be computed. Their outputs are drawn from
a table of normally distributed numbers instead. They are not zero, so that code that divides by them or uses them as
indices gets ordinary values.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def drawn_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns a tensor of the shape and type of `module`'s output; None if the module has to be run.

    A call that the module would reject is run too, so that it raises its error.

    Args:
        module: the called module; only torch.nn's own Linears and convolutions without hooks are drawn.
        args, kwargs: the arguments of the call.
    """
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        return None
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    x, kind = args[0], type(module)
    if kind is nn.Linear:
        shape = _of_linear(module, x)
    elif kind in _CONVOLUTIONS:
        shape = _of_convolution(module, x, _CONVOLUTIONS[kind])
    else:
        return None
    weight = module._parameters.get("weight")
    if shape is None or weight is None or weight.dtype != x.dtype or weight.device != x.device:
        return None
    return _drawn(shape, x)


def _of_linear(module: nn.Module, x: Tensor) -> tuple[int, ...] | None:
    inside, outside = module.in_features, module.out_features
    fits = x.ndim > 0 and x.shape[-1] == inside and x.numel() > 0
    return (*x.shape[:-1], int(outside)) if fits else None  # type: ignore[arg-type]


def _of_convolution(module: nn.Module, x: Tensor, axes: int) -> tuple[int, ...] | None:
    conv: Any = module
    if not x.is_contiguous():  # in channels-last order, the output would be in this order too
        return None
    if x.ndim != axes + 2 or x.shape[1] != conv.in_channels or isinstance(conv.padding, str):
        return None
    sizes = [
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, pad, dilation, kernel, stride in zip(
            x.shape[2:], conv.padding, conv.dilation, conv.kernel_size, conv.stride, strict=True
        )
    ]
    if x.numel() == 0 or min(sizes) < 1 or conv.padding_mode != "zeros":
        return None
    return (x.shape[0], conv.out_channels, *sizes)


def _drawn(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns values that depend on the first size, so that recordings that contain them as constants differ."""
    table, count = _table().to(like), math.prod(shape)
    start = 64 * shape[0] % 4096  # aligned, as `view_as_complex` requires
    return table.repeat(1 - (-start - count) // len(table))[start : start + count].view(shape)


@functools.cache
def _table() -> Tensor:
    return torch.randn(4099, generator=torch.Generator().manual_seed(0))  # a prime: rows of an output differ
