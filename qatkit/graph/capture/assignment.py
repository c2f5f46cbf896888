"""`x[index] = value` as nodes that make a new tensor: for slices, integers, lists, masks and tensors of indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from qatkit.graph.capture.calls import tensors_in

if TYPE_CHECKING:
    from qatkit.graph.capture.recorder import Recorder


def assign(recorder: Recorder, whole: Tensor, index: Any, value: Any) -> None:
    """Carries out the assignment, and records it."""
    if isinstance(index, list):
        index = torch.tensor(index)
    parts = index if isinstance(index, tuple) else (index,)
    by_place = isinstance(index, tuple) and any(isinstance(part, (list, Tensor)) for part in parts)
    if by_place and not all(isinstance(part, Tensor) and part.dtype != torch.bool for part in parts):
        _assign_each(recorder, whole, parts, value)
        return
    old = recorder.aliases.node_of(whole)
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        node = _where(recorder, old, whole, index, value)
    elif any(True for _ in tensors_in(index)):
        node = recorder.emit(
            "call_function",
            torch.index_put,
            (old, recorder.node_of(parts), _tensor(recorder, value, whole)),
            {},
        )
    else:
        with torch._C.DisableTorchFunction():
            part = whole[index]
        new = spread(recorder, recorder.node_of(value), value, part)
        node = recorder.aliases.assign(old, whole.shape, _no_none(index), new)
    with torch._C.DisableTorchFunction():
        whole[index] = value
    recorder.aliases.changed(whole, node)


def places(recorder: Recorder, index: Any) -> Any:
    """An index that is read: a mask that is known now becomes the places of its ones."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts):
        return index
    found: list[Any] = []
    for part in parts:
        if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
            recorder.check_constant("masked_select", (part,))
            with torch._C.DisableTorchFunction():
                found += part.nonzero(as_tuple=True)
        else:
            found.append(part)
    return tuple(found)


def spread(recorder: Recorder, node: Any, value: Any, over: Tensor) -> Any:
    """The node of `value`, of the shape and type of `over`."""
    if not isinstance(value, Tensor):
        return recorder.emit("call_function", torch.full, (tuple(over.shape), node), {"dtype": over.dtype})
    if value.dtype != over.dtype:
        node = recorder.emit("call_method", "to", (node, over.dtype), {})
    for _ in range(value.ndim - over.ndim):  # leading axes of one
        node = recorder.emit("call_method", "squeeze", (node, 0), {})
    if value.shape[max(value.ndim - over.ndim, 0) :] != over.shape:
        node = recorder.emit("call_method", "expand", (node, *over.shape), {})
    return node


def _where(recorder: Recorder, old: fx.Node, whole: Tensor, mask: Tensor, value: Any) -> fx.Node:
    if isinstance(value, Tensor) and value.numel() > 1:
        raise recorder.refuse(
            "as many values as a mask has ones are assigned: their number depends on values"
        )
    condition = recorder.node_of(mask)
    for _ in range(whole.ndim - mask.ndim):
        condition = recorder.emit("call_method", "unsqueeze", (condition, -1), {})
    return recorder.emit("call_function", torch.where, (condition, _tensor(recorder, value, whole), old), {})


def _tensor(recorder: Recorder, value: Any, like: Tensor) -> Any:
    if isinstance(value, Tensor):
        return recorder.node_of(value)
    return recorder.emit("call_function", torch.full, ((), value), {"dtype": like.dtype})


def _assign_each(recorder: Recorder, whole: Tensor, parts: tuple[Any, ...], value: Any) -> None:
    """`x[:, [0, 2]] = value`: one after the other."""
    lists = [i for i, part in enumerate(parts) if isinstance(part, (list, Tensor))]
    chosen = torch.as_tensor(parts[lists[0]])
    if len(lists) > 1 or chosen.ndim != 1 or any(part is None or part is Ellipsis for part in parts):
        raise recorder.refuse("an assignment to slices and tensors of indices can't be followed")
    recorder.check_constant("__index__", (chosen,))
    if chosen.dtype == torch.bool:
        chosen = chosen.nonzero()[:, 0]
    at = lists[0]
    with torch._C.DisableTorchFunction():
        shape = whole[parts].shape
    axis = sum(isinstance(part, slice) for part in parts[:at]) - len(
        shape
    )  # of the list, in what is assigned
    for i, place in enumerate(chosen.tolist()):
        one = value
        if isinstance(value, Tensor) and value.ndim >= -axis:
            one = recorder(torch.Tensor.select, value, axis, i if value.shape[axis] > 1 else 0)
        assign(recorder, whole, (*parts[:at], place, *parts[at + 1 :]), one)


def _no_none(index: Any) -> Any:
    """An index that is assigned to, without its new axes (they are one long)."""
    return tuple(part for part in index if part is not None) if isinstance(index, tuple) else index
