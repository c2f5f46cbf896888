"""Pooling operators, over windows and over all positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.importing.operators.padding import SAME, same_pads
from qatkit.importing.operators.table import Node, Value, function
from qatkit.importing.operators.values import tensor

_MAX: Sequence[Any] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGE: Sequence[Any] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_GLOBAL: Sequence[Any] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


def _window(node: Node, x: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns kernel, stride, dilation and pads (begins, then ends)."""
    kernel = list(node.get("kernel_shape"))
    stride = list(node.get("strides") or [1] * len(kernel))
    dilation = list(node.get("dilations") or [1] * len(kernel))
    auto = node.get("auto_pad", "NOTSET")
    pads = list(node.get("pads") or [0] * (2 * len(kernel)))
    if auto != "NOTSET":
        pads = (
            same_pads(auto, x.shape[2:], kernel, stride, dilation)
            if auto in SAME
            else [0] * (2 * len(kernel))
        )
    return kernel, stride, dilation, pads


def _count(size: int, kernel: int, stride: int, dilation: int, pads: int, ceil: bool) -> int:
    """Returns the number of windows along an axis."""
    span = size + pads - (kernel - 1) * dilation - 1
    return (-(-span // stride) if ceil else span // stride) + 1


def _for_torch(pads: Sequence[int]) -> list[int]:
    axes = len(pads) // 2
    return [size for axis in reversed(range(axes)) for size in (pads[axis], pads[axis + axes])]


def _with_places(node: Node) -> str:
    several = sum(map(bool, node.outputs)) > 1
    return (
        "its second output, the indices of the largest values, has no PyTorch equivalent" if several else ""
    )


def _dilated(node: Node) -> str:
    dilated = any(size != 1 for size in node.get("dilations") or ())
    return f"{node.op_type} with dilations has no PyTorch equivalent" if dilated else ""


@function("MaxPool", refuses=_with_places)
def max_pool(node: Node, x: Value) -> Tensor:
    """Pools by maximum.

    Asymmetric padding becomes padding by the amount at the beginning on both sides, together with torch's `ceil_mode`,
    whose last windows may reach beyond the input, if that gives the same number of windows. For other padding that
    torch's pools do not support, the input is padded with -inf.
    """
    x = tensor(x)
    kernel, stride, dilation, pads = _window(node, x)
    axes, ceil = len(kernel), bool(node.get("ceil_mode", 0))
    pool, begins, ends = _MAX[axes - 1], pads[:axes], pads[axes:]
    if begins == ends and all(2 * pad <= k for pad, k in zip(begins, kernel, strict=True)):
        return pool(x, kernel, stride, begins, dilation, ceil)
    sizes = list(zip(x.shape[2:], kernel, stride, dilation, begins, ends, strict=True))
    wanted = [_count(size, k, s, d, low + high, ceil) for size, k, s, d, low, high in sizes]
    open_ended = [_count(size, k, s, d, 2 * low, True) for size, k, s, d, low, _ in sizes]
    if wanted == open_ended and all(2 * pad <= k for pad, k in zip(begins, kernel, strict=True)):
        return pool(x, kernel, stride, begins, dilation, True)
    padded = F.pad(x, _for_torch(pads), value=float("-inf"))
    return pool(padded, kernel, stride, 0, dilation, ceil)


@function("AveragePool", refuses=_dilated)
def average_pool(node: Node, x: Value) -> Tensor:
    """Pools by mean; padding counts only with `count_include_pad`."""
    x = tensor(x)
    kernel, stride, _, pads = _window(node, x)
    axes, ceil, whole = len(kernel), bool(node.get("ceil_mode", 0)), bool(node.get("count_include_pad", 0))
    pool, begins, ends = _AVERAGE[axes - 1], pads[:axes], pads[axes:]
    if begins == ends and all(2 * pad <= k for pad, k in zip(begins, kernel, strict=True)):
        return pool(x, kernel, stride, begins, ceil, whole)
    flat = _for_torch(pads)
    pooled: Tensor = pool(F.pad(x, flat), kernel, stride, 0, ceil)
    if whole:
        return pooled
    counted: Tensor = pool(F.pad(torch.ones_like(x[:1, :1]), flat), kernel, stride, 0, ceil)
    return pooled / counted


@function("GlobalAveragePool")
def global_average_pool(node: Node, x: Value) -> Tensor:
    """Returns the mean over all positions; the axes are kept with size 1."""
    x = tensor(x)
    if not 3 <= x.ndim <= 5:
        return torch.mean(x, list(range(2, x.ndim)), keepdim=True)
    found: Tensor = _GLOBAL[x.ndim - 3](x, 1)
    return found


@function("GlobalMaxPool")
def global_max_pool(node: Node, x: Value) -> Tensor:
    """Returns the largest value over all positions; the axes are kept with size 1."""
    x = tensor(x)
    return torch.amax(x, list(range(2, x.ndim)), keepdim=True)


@function("LpPool", refuses=_dilated)
def lp_pool(node: Node, x: Value) -> Tensor:
    """Returns the p-norm of each window."""
    x, p = tensor(x), node.get("p", 2)
    kernel, stride, _, pads = _window(node, x)
    axes = len(kernel)
    if node.get("ceil_mode", 0):  # pads with zeros up to the end of the last window
        for axis, size in enumerate(x.shape[2:]):
            both = pads[axis] + pads[axis + axes]
            count = _count(size, kernel[axis], stride[axis], 1, both, True)
            pads[axis + axes] += max(0, (count - 1) * stride[axis] + kernel[axis] - size - both)
    powers = F.pad(torch.abs(x) ** p, _for_torch(pads))
    means: Tensor = _AVERAGE[axes - 1](powers, kernel, stride, 0)
    return (means * math.prod(kernel)) ** (1.0 / p)
