"""Finds the pieces that a model cuts out of the batch, by comparing recorded runs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from qatkit.graph.capture.run import Recording

_CUTS = ("chunk", "split", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "dsplit")


def cuts(*nodes: fx.Node) -> tuple[int, list[tuple[int, ...]]] | None:
    """Returns the axis along which a call cuts a tensor, and for each piece, where it ends in each run.

    Returns None for a call that does not cut, and if the pieces do not grow in proportion to the tensor.

    Args:
        nodes: the node of the call in each run; the runs may differ along other axes as well.
    """
    if len({_name(node) for node in nodes}) > 1 or _name(nodes[0]) not in _CUTS:
        return None
    pieces = [{user.args[1]: user.meta["shape"] for user in node.users if _is_piece(user)} for node in nodes]
    count, wholes = len(nodes[0].users), [_shape(node) for node in nodes]
    if not count or any(set(found) != set(range(count)) for found in pieces):
        return None
    axes = [i for i, (part, all_) in enumerate(zip(pieces[0][0], wholes[0], strict=False)) if part != all_]
    if len(axes) != 1 or len({len(shape) for shape in wholes}) > 1:
        return None
    (axis,) = axes
    whole = [shape[axis] for shape in wholes]
    sizes = [tuple(found[i][axis] for found in pieces) for i in range(count)]
    if len(set(whole)) == 1 or not all(_grows(size, whole) for size in sizes):
        return None
    ends = itertools.accumulate(sizes, lambda end, size: tuple(map(operator.add, end, size)))
    return axis, list(ends)


def _grows(size: Sequence[int], whole: Sequence[int]) -> bool:
    """Returns whether a piece is the same fraction of the whole in all runs."""
    return all(part and part * whole[0] == size[0] * all_ for part, all_ in zip(size, whole, strict=True))


def turns(node: fx.Node, other: fx.Node) -> tuple[int, tuple[int, int]] | None:
    """Returns the axis of a `roll` of the batch, and the index of the image that it puts first in each run.

    Returns None for any other call, and for a `roll` with the same arguments in both runs.
    """
    axis = _batch_axis(node, other)
    given, theirs = (
        dict(zip(("shifts", "dims"), one.args[1:], strict=False)) | one.kwargs for one in (node, other)
    )
    if axis is None or _name(node) != "roll" or given == theirs:
        return None
    shifts, its, along = (
        _single(one) for one in (given.get("shifts"), theirs.get("shifts"), given.get("dims"))
    )
    if shifts is None or its is None or along is None or along % len(_shape(node)) != axis:
        return None
    sizes = _shape(node)[axis], _shape(other)[axis]
    return axis, (-shifts % sizes[0], -its % sizes[1])


def _single(value: Any) -> int | None:
    found = value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value
    return found if isinstance(found, int) else None


def _is_piece(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], int) and "shape" in node.meta


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of a node's first argument."""
    first = node.args[0] if node.args else None
    return tuple(first.meta.get("shape", ())) if isinstance(first, fx.Node) else ()


def _batch_axis(node: fx.Node, other: fx.Node) -> int | None:
    """Returns the axis in which the first argument's shape differs between the runs; None unless there is just one."""
    mine, theirs = _shape(node), _shape(other)
    differing = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b]
    return differing[0] if len(differing) == 1 and len(mine) == len(theirs) else None


def may_halve(one: Recording, other: Recording) -> bool:
    """Returns whether a model may cut the batch at a fraction of its size.

    Two runs cannot always tell this from a fixed size: half of 2 and half of 3 images are both 1.
    """
    pairs = zip(one.graph.nodes, other.graph.nodes, strict=False)
    return any(_may_halve(node, its) for node, its in pairs)


def _may_halve(node: fx.Node, other: fx.Node) -> bool:
    axis = _batch_axis(node, other)
    if axis is None:
        return False
    if _name(node) in _CUTS:
        return cuts(node, other) is None
    if _name(node) in ("roll", "narrow", "select"):
        return True
    return _is_place(_index(node, axis))


def takes_every_nth(node: fx.Node, other: fx.Node) -> bool:
    """Returns whether a call selects every n-th image of the batch."""
    axis = _batch_axis(node, other)
    index = None if axis is None else _index(node, axis)
    return isinstance(index, slice) and index.step not in (None, 1)


def _index(node: fx.Node, axis: int) -> Any:
    """Returns the part of an index that belongs to an axis; None if it can't be assigned to one."""
    if node.target is not operator.getitem:
        return None
    given = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    before = given[: axis + 1]
    if len(before) <= axis or not all(isinstance(part, slice) for part in before[:-1]):
        return None
    return before[-1]


def _is_place(index: Any) -> bool:
    """Returns whether an index may cut within the batch.

    It may if it is a slice that starts or stops elsewhere than at 0, or an image after the first.
    """
    if isinstance(index, slice):
        return any(isinstance(end, int) and end for end in (index.start, index.stop))
    return isinstance(index, int) and index > 0
