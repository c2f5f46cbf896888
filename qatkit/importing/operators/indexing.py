"""Operators that gather values of a tensor by index, or scatter values by index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from qatkit.importing.operators.table import Array, Node, Value, function, module
from qatkit.importing.operators.values import axes_of, ints, one_int, tensor


@module("Gather")
def embedding(node: Node, constants: Sequence[Array | None]) -> nn.Module | None:
    """Returns an embedding for computed indices into the rows of a constant float table; None for any other Gather."""
    table = constants[0]
    if (
        table is None
        or constants[1] is not None
        or table.ndim != 2
        or node.get("axis", 0)
        or table.dtype.kind != "f"
    ):
        return None
    made = nn.Embedding(*table.shape)
    made.weight.data = torch.from_numpy(table.copy())
    return made


@function("Gather")
def gather(node: Node, x: Value, places: Value) -> Tensor:
    """Gathers slices along an axis; a scalar index removes the axis."""
    x = tensor(x, places if isinstance(places, Tensor) else None)
    axis = node.get("axis", 0) % x.ndim
    if isinstance(places, Tensor):
        flat = torch.index_select(x, axis, _from_front(places.reshape(-1), x.shape[axis]))
        return flat.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])
    known = np.asarray(places)
    known = np.where(known < 0, known + x.shape[axis], known)
    if known.ndim == 0:
        return x.select(axis, int(known))
    picked = torch.index_select(x, axis, tensor(known.reshape(-1).astype(np.int64), x))
    return picked if known.ndim == 1 else picked.reshape(*x.shape[:axis], *known.shape, *x.shape[axis + 1 :])


def _from_front(places: Tensor, size: int) -> Tensor:
    return torch.where(places < 0, places + size, places)


@function("GatherElements")
def gather_elements(node: Node, x: Value, places: Value) -> Tensor:
    """Gathers one value per index along an axis."""
    x, axis = tensor(x), node.get("axis", 0)
    return torch.gather(x, axis, _from_front(tensor(places, x).long(), x.shape[axis]))


@function("GatherND")
def gather_nd(node: Node, x: Value, places: Value) -> Tensor:
    """Gathers slices; the last axis of the indices addresses the axes of x after the first `batch_dims` ones."""
    x = tensor(x)
    found, batch = tensor(places, x).long(), node.get("batch_dims", 0)
    index = list(torch.unbind(found, -1))
    for axis in range(batch):
        grid = torch.arange(x.shape[axis], device=x.device)
        index.insert(
            axis,
            grid.reshape([-1 if i == axis else 1 for i in range(found.ndim - 1)]).expand(found.shape[:-1]),
        )
    return x[tuple(index)]


@function("Slice", known=(1, 2, 3, 4))
def slices(
    node: Node, x: Value, starts: Value = None, ends: Value = None, axes: Value = None, steps: Value = None
) -> Tensor:
    """Slices along several axes; the ranges are attributes before opset 10."""
    x = tensor(x)
    low = list(node.get("starts")) if starts is None else ints(starts)
    high = list(node.get("ends")) if ends is None else ints(ends)
    along = (node.get("axes") if axes is None else ints(axes)) or list(range(len(low)))
    strides = ints(steps) or [1] * len(low)
    index, flipped = [slice(None)] * x.ndim, []
    for axis, start, stop, step in zip(axes_of(along, x.ndim), low, high, strides, strict=True):
        size = x.shape[axis]
        first, last, stride = slice(start, stop if stop >= -size or step > 0 else None, step).indices(size)
        if stride < 0:  # the same indices, in ascending order
            count = max(0, -(-(first - last) // -stride))
            flipped.append(axis)
            first, stride = size - 1 - first, -stride
            last = first + count * stride
        if first or last < size or stride != 1:
            index[axis] = slice(first, None if last >= size else last, stride)
    x = torch.flip(x, flipped) if flipped else x
    return x if all(one == slice(None) for one in index) else x[tuple(index)]


@function("ScatterElements", "Scatter")
def scatter_elements(node: Node, x: Value, places: Value, updates: Value) -> Tensor:
    """Scatters values by index along an axis; they replace the old values or are combined with them."""
    x, axis = tensor(x), node.get("axis", 0)
    index, source = _from_front(tensor(places, x).long(), x.shape[axis]), tensor(updates, x)
    kind = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}.get(node.get("reduction", "none"))
    if kind is None:
        return torch.scatter(x, axis, index, source)
    return torch.scatter_reduce(x, axis, index, source, kind)


def _unknown_reduction(node: Node) -> str:
    kind = node.get("reduction", "none")
    return "" if kind in ("none", "add") else f"ScatterND with reduction={kind} has no PyTorch equivalent"


@function("ScatterND", refuses=_unknown_reduction)
def scatter_nd(node: Node, x: Value, places: Value, updates: Value) -> Tensor:
    """Replaces slices of x or adds to them; the last axis of the indices addresses the leading axes of x."""
    x = tensor(x)
    index = tuple(torch.unbind(tensor(places, x).long(), -1))
    return torch.index_put(x, index, tensor(updates, x), accumulate=node.get("reduction", "none") == "add")


@function("OneHot", known=(1,))
def one_hot(node: Node, places: Value, depth: Value, values: Value) -> Tensor:
    """Sets `values[1]` at the index along a new axis, and `values[0]` elsewhere and for indices out of range."""
    index, count, pair = tensor(places).long(), one_int(depth), tensor(values)
    axis = node.get("axis", -1) % (index.ndim + 1)
    numbers = torch.arange(count, device=index.device)
    numbers = numbers.reshape([-1 if i == axis else 1 for i in range(index.ndim + 1)])
    hot = torch.unsqueeze(_from_front(index, count), axis) == numbers
    return torch.where(hot, pair[1], pair[0])


@function("NonZero")
def nonzero(node: Node, x: Value) -> Tensor:
    """Returns the indices of all nonzero values, [axes, count]."""
    return torch.nonzero(tensor(x)).T


@function("ReverseSequence")
def reverse_sequence(node: Node, x: Value, lengths: Value) -> Tensor:
    """Reverses the first part of each sequence, up to its length."""
    x = tensor(x)
    time, batch = node.get("time_axis", 0), node.get("batch_axis", 1)
    size = x.shape[time]
    steps = torch.arange(size, device=x.device).reshape(-1, 1)
    long = tensor(lengths, x).long().reshape(1, -1)
    places = torch.where(steps < long, long - 1 - steps, steps)
    places = places if time < batch else places.T
    view = [1] * x.ndim
    view[time], view[batch] = x.shape[time], x.shape[batch]
    return torch.gather(x, time, places.reshape(view).expand(x.shape))
