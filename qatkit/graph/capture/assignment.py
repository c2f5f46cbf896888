"""Records `x[index] = value` as nodes that compute a new tensor.

The index may contain slices, integers, lists, masks and tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx

from qatkit.graph.capture.calls import tensors_in

if TYPE_CHECKING:
    from qatkit.graph.capture.recorder import Recorder

_ALL = slice(None)
_MASKS = (torch.bool, torch.uint8)


def assign(recorder: Recorder, whole: Tensor, index: Any, value: Any) -> None:
    """Runs `whole[index] = value` and records it.

    Raises:
        UntraceableError: the assignment can't be written as nodes, or a mask depends on the inputs in a way that
            can't be followed.
    """
    parts = tuple(_part(recorder, part) for part in (index if isinstance(index, tuple) else (index,)))
    old = recorder.aliases.node_of(whole)
    if any(True for _ in tensors_in(parts)):
        node = _by_tensors(recorder, old, whole, _every_axis(parts, whole.ndim), value)
    else:
        node = _by_slices(recorder, old, whole, parts, value)
    with torch._C.DisableTorchFunction():
        whole[index] = value
    recorder.aliases.changed(whole, node)


def places(recorder: Recorder, index: Any) -> Any:
    """Returns an index for reading, in which masks are replaced by the indices where they are true.

    Raises:
        UntraceableError: a mask depends on the inputs.
    """
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.as_tensor(part) if isinstance(part, np.ndarray) else part for part in parts)
    if not any(isinstance(part, Tensor) and part.dtype in _MASKS for part in parts):
        return parts if isinstance(index, tuple) else parts[0]
    return tuple(_places(recorder, parts))


def _places(recorder: Recorder, parts: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for part in parts:
        if isinstance(part, Tensor) and part.dtype in _MASKS:
            recorder.check_constant("masked_select", (part,))
            with torch._C.DisableTorchFunction():
                found += part.nonzero(as_tuple=True)
        else:
            found.append(part)
    return found


def spread(recorder: Recorder, node: Any, value: Any, over: Tensor) -> Any:
    """Returns the node of `value`, broadcast to the shape and converted to the type of `over`.

    `node` is the node of `value`, or the number itself.
    """
    if not isinstance(value, Tensor):
        return recorder.emit("call_function", torch.full, (tuple(over.shape), node), {"dtype": over.dtype})
    if value.dtype != over.dtype:
        node = recorder.emit("call_method", "to", (node, over.dtype), {})
    for _ in range(value.ndim - over.ndim):  # leading axes of size one
        node = recorder.emit("call_method", "squeeze", (node, 0), {})
    if value.shape[max(value.ndim - over.ndim, 0) :] != over.shape:
        node = recorder.emit("call_method", "expand", (node, *over.shape), {})
    return node


def _part(recorder: Recorder, part: Any) -> Any:
    """Returns a part of an index: lists and arrays become tensors, and scalar tensors become integers.

    A scalar tensor that depends on the inputs stays a tensor.
    """
    if isinstance(part, (list, np.ndarray)):
        part = torch.as_tensor(part)
    if isinstance(part, np.integer):
        return int(part)
    if isinstance(part, Tensor) and not part.ndim and part.dtype not in _MASKS:
        known = recorder.aliases.node_of(part) not in recorder.depends
        return int(part) if known else part
    return part


def _every_axis(parts: Sequence[Any], ndim: int) -> list[Any]:
    """Returns the parts of an index with a slice for each axis that they leave out."""
    taken = sum(
        part.ndim if isinstance(part, Tensor) and part.dtype in _MASKS else 1
        for part in parts
        if part is not None and part is not Ellipsis
    )
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    return [*parts[:at], *[_ALL] * (ndim - taken), *parts[at + 1 :]]


def _by_slices(
    recorder: Recorder, old: fx.Node, whole: Tensor, parts: tuple[Any, ...], value: Any
) -> fx.Node:
    plain = tuple(part for part in parts if part is not None)
    with torch._C.DisableTorchFunction():
        part, place = whole[parts], whole[plain]
    new = spread(recorder, recorder.node_of(value), value, part)
    if len(plain) < len(parts):  # a new axis in the index of an assignment has size one
        new = recorder.emit("call_method", "reshape", (new, *place.shape), {})
    return recorder.aliases.assign(old, whole.shape, plain, new)


def _by_tensors(recorder: Recorder, old: fx.Node, whole: Tensor, parts: list[Any], value: Any) -> fx.Node:
    """Returns the node after an assignment by slices and index tensors.

    The slices are applied first, so that the tensors index full axes.
    """
    if None in [part for part in parts if not isinstance(part, Tensor)]:
        raise recorder.not_followed("an assignment to an index with both None and a tensor can't be followed")
    slices: list[Any] = []
    for part in parts:
        mask = isinstance(part, Tensor) and part.dtype in _MASKS
        slices += [part] if isinstance(part, slice) else [_ALL] * (part.ndim if mask else 1)
    if any(one != _ALL for one in slices):
        cut = recorder.emit("call_function", operator.getitem, (old, tuple(slices)), {})
        with torch._C.DisableTorchFunction():
            inner = whole[tuple(slices)]
        whole_axes = [_ALL if isinstance(part, slice) else part for part in parts]
        new = _by_tensors(recorder, cut, inner, whole_axes, value)
        return recorder.aliases.assign(old, whole.shape, tuple(slices), new)
    chosen = [part for part in parts if not isinstance(part, slice)]
    if len(chosen) == 1 and chosen[0].dtype == torch.bool:
        at = next(i for i, part in enumerate(parts) if part is chosen[0])
        behind = len(parts) - 1 - at
        picked = recorder.picked.value(value, chosen[0], behind) if at == 0 else None
        if picked is not None or not isinstance(value, Tensor) or value.numel() == 1 or value.ndim <= behind:
            return _where(recorder, old, whole, chosen[0], value, behind, picked)
    return _index_put(recorder, old, whole, _places(recorder, parts), value)


def _where(
    recorder: Recorder,
    old: fx.Node,
    whole: Tensor,
    mask: Tensor,
    value: Any,
    behind: int,
    picked: fx.Node | None,
) -> fx.Node:
    """Returns the node with `value`, or the values of `picked`, where `mask` is true, and the old values elsewhere.

    The mask lacks the last `behind` axes of the tensor.
    """
    condition = recorder.node_of(mask)
    for _ in range(behind):
        condition = recorder.emit("call_method", "unsqueeze", (condition, -1), {})
    if picked is not None:
        new = (
            picked
            if value.dtype == whole.dtype
            else recorder.emit("call_method", "to", (picked, whole.dtype), {})
        )
    elif isinstance(value, Tensor) and value.numel() > 1:  # one row, which `where` broadcasts
        new = recorder.node_of(value)
        new = (
            new if value.dtype == whole.dtype else recorder.emit("call_method", "to", (new, whole.dtype), {})
        )
    else:
        with torch._C.DisableTorchFunction():
            new = spread(recorder, recorder.node_of(value), value, whole.new_empty(()))
    return recorder.emit("call_function", torch.where, (condition, new, old), {})


def _index_put(recorder: Recorder, old: fx.Node, whole: Tensor, parts: list[Any], value: Any) -> fx.Node:
    """Returns the node after an assignment by index tensors, which moves the indexed axes to the front first."""
    axes = [i for i, part in enumerate(parts) if not isinstance(part, slice)]
    rest = [i for i in range(whole.ndim) if i not in axes]
    indices = [torch.as_tensor(parts[i]) for i in axes]
    with torch._C.DisableTorchFunction():
        part = whole[tuple(parts)]
        count = torch.broadcast_tensors(*indices)[0].ndim
    new = spread(recorder, recorder.node_of(value), value, part)
    first = (
        axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0
    )  # torch moves the indexed axes to the front, too
    moved = list(range(first, first + count))
    order = moved + [i for i in range(part.ndim) if i not in moved]
    new = _permuted(recorder, new, order)
    old = _permuted(recorder, old, axes + rest)
    put = recorder.emit(
        "call_function", torch.index_put, (old, tuple(map(recorder.node_of, indices)), new), {}
    )
    back = [(axes + rest).index(i) for i in range(whole.ndim)]
    return _permuted(recorder, put, back)


def _permuted(recorder: Recorder, node: fx.Node, order: list[int]) -> fx.Node:
    if order == sorted(order):
        return node
    return recorder.emit("call_method", "permute", (node, *order), {})
