"""Tracks, through views and in-place changes, which node holds the current values of each tensor object.

For each view, its parent and the nodes that made it are stored. An in-place change raises the version that all views
of the memory share, and is passed on:

    up     New nodes compute the parent with the changed part (a Cat of the values before it, the part, and the values
           after it; a reshape or permute back), then the parent's parent, and so on up to the memory's owner.
    down   Any other view is computed again from its parent when it is next read.

The graph is thus functional for `x[:, 1:] += y`, for `q, k = x.chunk(2, 1); q.mul_(s); f(x)` and for writes into
slices of a new tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass
class Value:
    """The graph's record of one tensor object.

    Attributes:
        node: the node that holds the values of `version`.
        version: the version of the tensor at which `node` holds its values.
        parent: the tensor that this one is a view of; None if there is none, or if the view can't be followed.
        chain: the nodes that make this tensor from its parent: a view, or a split and a getitem.
    """

    node: fx.Node
    version: int
    parent: Tensor | None = None
    chain: tuple[fx.Node, ...] = ()


class Aliases:
    """The nodes of all tensor objects that still exist.

    Args:
        emit: a function that adds a node: (op, target, args, kwargs) → node.
        first: a function that makes the node of a tensor that was never seen (a parameter, a constant).
        refuse: a function that returns the error for a reason.
    """

    def __init__(
        self,
        emit: Callable[[str, Any, tuple[Any, ...], dict[str, Any]], fx.Node],
        first: Callable[[Tensor], fx.Node],
        refuse: Callable[[str], Exception],
    ) -> None:
        self.emit, self.first, self.refuse = emit, first, refuse
        self.values = WeakTensorKeyDictionary()

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Returns the node that holds the current values of `tensor`.

        Raises:
            UntraceableError: the tensor was changed in place in a way that can't be followed.
        """
        value: Value | None = self.values.get(tensor)
        if value is None:
            value = self.values[tensor] = Value(self.first(tensor), tensor._version)
        if value.version != tensor._version:
            if value.parent is None:
                raise self.refuse("a tensor is changed in place in a way that can't be followed")
            node = self.node_of(value.parent)
            before = value.chain[0].args[0]
            for step in value.chain:
                node, before = self._again(step, before, node), step
            value.node, value.version = node, tensor._version
        value.node.meta.setdefault(
            "shape", tuple(tensor.shape)
        )  # an in-place change has no result of its own
        return value.node

    def _again(self, step: fx.Node, old: Any, new: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((step.args, step.kwargs), lambda n: new if n is old else n)
        return self.emit(step.op, step.target, args, kwargs)

    def bind(self, tensor: Tensor, chain: tuple[fx.Node, ...], sources: Sequence[Tensor]) -> None:
        """Binds a new tensor to the last node of `chain`.

        It is recorded as a view of the first tensor in `sources` that shares its memory, if `chain` starts
        from that tensor's node, and otherwise as a tensor without a parent.
        """
        parent = next((s for s in sources if s is not tensor and shares_memory(s, tensor)), None)
        if parent is None or self.values[parent].node is not chain[0].args[0]:
            # Not a view of the first argument. If it is changed, reading it later is rejected.
            self.values[tensor] = Value(chain[-1], tensor._version)
        else:
            self.values[tensor] = Value(chain[-1], tensor._version, parent, chain)

    def changed(self, tensor: Tensor, node: fx.Node) -> None:
        """Records that `tensor` was changed in place and holds the output of `node`.

        The tensors that it is a view of change too.

        Raises:
            UntraceableError: it is a view of a kind that can't be followed.
        """
        value: Value = self.values[tensor]
        value.node, value.version = node, tensor._version
        if value.parent is not None:
            above: Value = self.values[value.parent]
            self.changed(value.parent, self._put(above.node, value, node))

    def moved(self, tensor: Tensor, node: fx.Node) -> None:
        """Records that `tensor` was moved to other memory and holds the output of `node`.

        Its views stay in the old memory.
        """
        own: Value = self.values[tensor]
        children = [view for view, value in self.values.items() if value.parent is tensor]
        for view in children:
            self.node_of(view)
            self.values[view].parent = own.parent
            if own.parent is not None:
                self.values[view].chain = (*own.chain, *self.values[view].chain)
        self.values[tensor] = Value(node, tensor._version)

    def _put(self, whole: fx.Node, view: Value, part: fx.Node) -> fx.Node:
        """Returns `whole` with `part` in the place of `view`."""
        parent = view.parent
        assert parent is not None
        first = view.chain[0]
        name = first.target if isinstance(first.target, str) else getattr(first.target, "__name__", "")
        if len(view.chain) == 2:
            return self._put_piece(whole, view, part, str(name))
        if name in (
            "view",
            "reshape",
            "flatten",
            "unflatten",
            "squeeze",
            "unsqueeze",
            "view_as",
            "reshape_as",
        ):
            return self.emit("call_method", "reshape", (part, *parent.shape), {})
        if name in ("transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint"):
            return self.emit("call_method", "permute", (part, *_way_back(first, parent.ndim)), {})
        if name in ("detach", "contiguous", "alias", "to", "clone") or first.op == "call_module":
            return part
        if name == "getitem":
            return self.assign(whole, parent.shape, first.args[1], part)
        if name in ("select", "narrow"):
            return self.assign(whole, parent.shape, _as_index(first, str(name)), part)
        if name == "diagonal":
            return self._on_diagonal(whole, parent, first, part)
        raise self.refuse(f"a view made by {name} is changed in place, which can't be followed")

    def _on_diagonal(self, whole: fx.Node, parent: Tensor, view: fx.Node, part: fx.Node) -> fx.Node:
        """Returns `whole` with `part` on a diagonal of its matrices.

        A mask marks the diagonal. The values of the part are aligned with the rows, so that `torch.where` can put
        them there.
        """
        given: dict[str, Any] = dict(zip(("offset", "dim1", "dim2"), view.args[1:], strict=False))
        given |= view.kwargs
        offset, axes = given.get("offset", 0), [given.get(f"dim{i}", i - 1) % parent.ndim for i in (1, 2)]
        order = [i for i in range(parent.ndim) if i not in axes] + axes
        rows, columns = (parent.shape[axis] for axis in axes)
        with torch._C.DisableTorchFunction():
            eye = torch.ones(rows, columns).tril(offset).triu(offset).bool()
            length = int(eye.sum())
            places = (torch.arange(rows) - max(-offset, 0)).clamp(0, max(length - 1, 0))
        values = part
        if length != rows:
            values = self.emit("call_method", "index_select", (part, -1, self.node_of(places)), {})
        values = self.emit("call_method", "unsqueeze", (values, -1), {})
        turned = order != sorted(order)
        old = self.emit("call_method", "permute", (whole, *order), {}) if turned else whole
        new = self.emit("call_function", torch.where, (self.node_of(eye), values, old), {})
        back = [order.index(i) for i in range(parent.ndim)]
        return self.emit("call_method", "permute", (new, *back), {}) if turned else new

    def _put_piece(self, whole: fx.Node, view: Value, part: fx.Node, name: str) -> fx.Node:
        """Returns `whole` with `part` in the place of one piece of a chunk, split or unbind."""
        first, last = view.chain
        if (
            name not in ("chunk", "split", "unbind", "tensor_split", "split_with_sizes")
            or view.parent is None
        ):
            raise self.refuse(f"a view made by {name} is changed in place, which can't be followed")
        place = 1 if name == "unbind" else 2
        axis = first.kwargs.get("dim", first.args[place] if len(first.args) > place else 0)
        again = self._again(first, first.args[0], whole)
        made = _run(first, view.parent)
        pieces = [
            part if i == last.args[1] else self.emit("call_function", operator.getitem, (again, i), {})
            for i in range(len(made))
        ]
        joined = torch.stack if name == "unbind" else torch.cat
        return self.emit("call_function", joined, (pieces, axis), {})

    def assign(self, whole: fx.Node, shape: Sequence[int], index: Any, part: Any) -> fx.Node:
        """Returns the node of `whole` [shape] after `whole[index] = part`.

        Slices and integers become a Cat of the values before, the part and the values after, axis by axis. A slice
        with a step becomes a slice_scatter.

        Args:
            whole: the node of the tensor before the assignment.
            shape: the shape of `whole`.
            index: the index; slices, integers and an ellipsis are supported.
            part: a node with the shape of the indexed part, or a number.

        Raises:
            UntraceableError: the index has other parts.
        """
        steps = _axes(index, len(shape))
        if steps is None:
            raise self.refuse("an assignment to an index with None, a boolean or a tensor can't be followed")
        return self._assign(whole, list(shape), steps, part, axis=0)

    def _assign(self, whole: fx.Node, shape: list[int], steps: list[Any], part: Any, axis: int) -> fx.Node:
        whole_slice = slice(None)
        while axis < len(steps) and _is_whole(steps[axis], shape[axis]):
            axis += 1
        if axis == len(steps):
            return self._filled(whole, part)
        step, size = steps[axis], shape[axis]
        if isinstance(step, slice):
            start, stop, stride = step.indices(size)
            if stride != 1:
                return self._strided(whole, shape, steps, part, axis)
        else:
            start = step + size if step < 0 else step
            stop = start + 1
            if isinstance(part, fx.Node):  # the integer's axis is inserted again, as earlier ones have been
                part = self.emit("call_method", "unsqueeze", (part, axis), {})
        rest = [whole_slice] * (axis + 1) + steps[axis + 1 :]
        inner_shape = [*shape[:axis], max(stop - start, 0), *shape[axis + 1 :]]

        def cut(low: int, high: int | None) -> fx.Node:
            index = (*[whole_slice] * axis, slice(low, high))
            return self.emit("call_function", operator.getitem, (whole, index), {})

        middle = self._assign(cut(start, stop), inner_shape, rest, part, axis + 1)
        pieces = [cut(0, start)] * (start > 0) + [middle] + [cut(stop, None)] * (stop < size)
        return middle if len(pieces) == 1 else self.emit("call_function", torch.cat, (pieces, axis), {})

    def _strided(self, whole: fx.Node, shape: list[int], steps: list[Any], part: Any, axis: int) -> fx.Node:
        """Assigns to every n-th element along `axis`."""
        start, stop, stride = steps[axis].indices(shape[axis])
        index = (*[slice(None)] * axis, steps[axis])
        inner = self.emit("call_function", operator.getitem, (whole, index), {})
        inner_shape = [*shape[:axis], len(range(start, stop, stride)), *shape[axis + 1 :]]
        rest = [slice(None)] * (axis + 1) + steps[axis + 1 :]
        new = self._assign(inner, inner_shape, rest, part, axis + 1)
        return self.emit("call_function", torch.slice_scatter, (whole, new, axis, start, stop, stride), {})

    def _filled(self, whole: fx.Node, part: Any) -> fx.Node:
        return (
            part
            if isinstance(part, fx.Node)
            else self.emit("call_function", torch.full_like, (whole, part), {})
        )


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors share one storage; False if one of them has none."""
    try:
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return False


def _run(node: fx.Node, tensor: Tensor) -> Any:
    """Applies the function or method of `node` to `tensor`."""
    target: Any = node.target
    with torch._C.DisableTorchFunction():
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: tensor)
        return (
            getattr(args[0], target)(*args[1:], **kwargs)
            if node.op == "call_method"
            else target(*args, **kwargs)
        )


def _axes(index: Any, ndim: int) -> list[Any] | None:
    """Returns an index as one slice or integer per axis; None if it has other parts."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None or not (part is Ellipsis or isinstance(part, (int, slice))) for part in parts):
        return None
    if any(isinstance(part, bool) for part in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (ndim - len(parts) + 1)
    return parts + [slice(None)] * (ndim - len(parts))


def _is_whole(step: Any, size: int) -> bool:
    return isinstance(step, slice) and step.indices(size) == (0, size, 1)


def _as_index(node: fx.Node, name: str) -> tuple[Any, ...]:
    """Returns `select(axis, i)` and `narrow(axis, start, length)` as an index."""
    names = ("self", "dim", "at", "length")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    start = given.get("at", given.get("index", given.get("start")))
    step = start if name == "select" else slice(start, start + given["length"])
    axis = given["dim"]
    if axis >= 0:
        return (*[slice(None)] * axis, step)
    return (Ellipsis, step, *[slice(None)] * (-axis - 1))


def _way_back(node: fx.Node, ndim: int) -> list[int]:
    """Returns the permutation that undoes how `node` reorders axes, by a trial with distinct sizes."""
    probe = torch.empty([i + 2 for i in range(ndim)], device="meta")
    order = [size - 2 for size in _run(node, probe).shape]
    return [order.index(axis) for axis in range(ndim)]
