"""Operators that reduce, sort, accumulate or normalize values along axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qatkit.importing.operators.table import Node, Value, function
from qatkit.importing.operators.values import axes_of, ints, one_int, tensor

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "ReduceSum": torch.sum,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceL1": lambda x, axes, keepdim: torch.sum(torch.abs(x), axes, keepdim=keepdim),
    "ReduceL2": lambda x, axes, keepdim: torch.sqrt(torch.sum(x * x, axes, keepdim=keepdim)),
    "ReduceSumSquare": lambda x, axes, keepdim: torch.sum(x * x, axes, keepdim=keepdim),
    "ReduceLogSum": lambda x, axes, keepdim: torch.log(torch.sum(x, axes, keepdim=keepdim)),
    "ReduceLogSumExp": torch.logsumexp,
}


def _axes(node: Node, x: Tensor, given: Value) -> list[int] | None:
    """Returns the axes to reduce; None if the node reduces nothing."""
    axes = node.get("axes") if given is None else ints(given)
    if not axes:
        return None if node.get("noop_with_empty_axes", 0) else list(range(x.ndim))
    return sorted(axes_of(list(axes), x.ndim))


@function(*_REDUCTIONS, known=(1,))
def reduce(node: Node, x: Value, axes: Value = None) -> Tensor:
    """Reduces axes, which are an attribute, or in newer opsets an input."""
    x = tensor(x)
    found = _axes(node, x, axes)
    if found is None:
        return x
    keep = bool(node.get("keepdims", 1)) and x.ndim > 0
    reduced = _REDUCTIONS[node.op_type](x if x.ndim else x.reshape(1), found or [0], keepdim=keep)
    return reduced.to(x.dtype)


@function("ReduceMean", known=(1,))
def reduce_mean(node: Node, x: Value, axes: Value = None) -> Tensor:
    """Computes the mean; uses a global pool, which has an 8-bit kernel, for the mean over the positions of an image."""
    x = tensor(x)
    found, keep = _axes(node, x, axes), bool(node.get("keepdims", 1))
    if found is None or not x.ndim:
        return x
    if found == [2, 3] and x.ndim == 4 and x.is_floating_point():
        pooled = F.adaptive_avg_pool2d(x, 1)
        return pooled if keep else torch.flatten(pooled, 1)
    if x.is_floating_point():
        return torch.mean(x, found, keepdim=keep)
    count = math.prod(x.shape[axis] for axis in found)
    return torch.div(torch.sum(x, found, keepdim=keep), count, rounding_mode="trunc").to(x.dtype)


@function("ReduceProd", known=(1,))
def reduce_prod(node: Node, x: Value, axes: Value = None) -> Tensor:
    """Returns the product, one axis after the other."""
    x = tensor(x)
    keep = bool(node.get("keepdims", 1))
    for axis in reversed(_axes(node, x, axes) or []):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


@function("ArgMax", "ArgMin")
def arg_extreme(node: Node, x: Value) -> Tensor:
    """Returns the index of the largest or smallest value along an axis: the first or the last of equal values."""
    x, axis = tensor(x), node.get("axis", 0)
    find = torch.argmax if node.op_type == "ArgMax" else torch.argmin
    keep = bool(node.get("keepdims", 1))
    if not node.get("select_last_index", 0):
        return find(x, axis, keepdim=keep)
    return x.shape[axis] - 1 - find(torch.flip(x, (axis,)), axis, keepdim=keep)


@function("TopK", known=(1,))
def top_k(node: Node, x: Value, count: Value = None) -> tuple[Tensor, Tensor]:
    """Returns the largest or smallest values along an axis and their indices; the earlier of equal values first."""
    x, axis = tensor(x), node.get("axis", -1)
    k = node.get("k") if count is None else one_int(count)
    values, places = torch.sort(x, dim=axis, descending=bool(node.get("largest", 1)), stable=True)
    return values.narrow(axis, 0, k), places.narrow(axis, 0, k)


@function("CumSum", known=(1,))
def cumulative_sum(node: Node, x: Value, axis: Value) -> Tensor:
    """Returns running sums along an axis, from either end, including or excluding the value itself."""
    x, along = tensor(x), one_int(axis)
    values = torch.flip(x, (along,)) if node.get("reverse", 0) else x
    summed = torch.cumsum(values, along).to(x.dtype)
    if node.get("exclusive", 0):
        summed = summed - values
    return torch.flip(summed, (along,)) if node.get("reverse", 0) else summed


@function("Softmax", "LogSoftmax", "Hardmax")
def softmax(node: Node, x: Value) -> Tensor:
    """Applies Softmax, LogSoftmax or Hardmax along `axis`; before opset 13 along all axes from `axis` on together."""
    x = tensor(x)
    old = node.version < 13
    axis = node.get("axis", 1 if old else -1) % x.ndim
    if old and axis != x.ndim - 1 and any(size != 1 for size in x.shape[axis + 1 :]):
        return _softmax(node, torch.flatten(x, axis), axis).reshape(x.shape)
    return _softmax(node, x, axis)


def _softmax(node: Node, x: Tensor, axis: int) -> Tensor:
    if node.op_type == "Hardmax":
        places = torch.argmax(x, axis, keepdim=True)
        return torch.zeros_like(x).scatter(axis, places, 1.0)
    apply: Any = F.softmax if node.op_type == "Softmax" else F.log_softmax
    found: Tensor = apply(x, axis)
    return found


def _unknown_norm(node: Node) -> str:
    p = node.get("p", 2)
    return (
        ""
        if p in (1, 2)
        else f"LpNormalization with p={p} is not in the ONNX specification, which has p=1 and p=2"
    )


@function("LpNormalization", refuses=_unknown_norm)
def lp_normalization(node: Node, x: Value) -> Tensor:
    """Divides values by their norm along an axis."""
    x, axis, p = tensor(x), node.get("axis", -1), node.get("p", 2)
    norm = (
        torch.sum(torch.abs(x), axis, keepdim=True)
        if p == 1
        else torch.sqrt(torch.sum(x * x, axis, keepdim=True))
    )
    return x / norm
