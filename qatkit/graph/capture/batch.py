"""Merges runs with different batch sizes into one graph for any size: differing numbers become functions of the size.

The sizes in each run's graph are plain numbers, such as 2·49 in one and 3·49 in the other. The graphs must have
the same nodes. If they do not, the batch size decides what is computed, which is rejected. A number that differs
becomes a node that computes `size · a + b`; one in a `reshape` or `view` may become -1. Runs whose other axes differ
too (`qatkit.graph.capture.free_axes`) are merged in the same way, with another function that computes the numbers.

A model that cuts the batch into halves (`x.chunk(2)`, `x[: len(x) // 2]`) is recorded with 2·2 and 3·2 images. Its
numbers are functions of half the size, and its graph accepts only multiples of two.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from qatkit.graph.capture.calls import WHOLE_BATCH, UntraceableError
from qatkit.graph.capture.pieces import cuts, takes_every_nth, turns
from qatkit.graph.capture.run import Recording

_HOW_MANY = "the size of the batch decides what is computed"


def merge(
    one: Recording, other: Recording, sizes: tuple[int, int], axis: tuple[int, int], factor: int = 1
) -> bool:
    """Makes the graph of `one` correct for other batch sizes; returns whether it cuts the batch.

    If it does (into halves, or by taking every n-th sample), it is correct only for multiples of `factor`. If
    `factor` is 1, the model has to be recorded again with a greater one.

    Args:
        one: the run whose graph is changed.
        other: the run with the other batch size.
        sizes: batch sizes of the two runs, divided by `factor`.
        axis: index of an input with a batch axis, and this axis.
        factor: a number that the batch sizes of both runs are multiples of.

    Raises:
        UntraceableError: the runs make different calls, or a number can't be written as a function of the size.
    """
    numbers = _OfTheBatch(one.graph, sizes, axis, factor)
    merging = _Merge(one, [other], numbers, _HOW_MANY)
    every_nth = any(map(takes_every_nth, one.graph.nodes, other.graph.nodes))
    merging.run()
    return numbers.divides or every_nth


Numbers = Callable[[fx.Node, tuple[int, ...]], "fx.Node | None"]


def merge_with(one: Recording, others: Sequence[Recording], numbers: Numbers, reason: str) -> None:
    """Makes the graph of `one` correct for the sizes of all runs: nodes compute the numbers that differ.

    Args:
        one: the run whose graph is changed.
        others: runs of the same model with inputs of other sizes.
        numbers: a function that takes a node with an argument that differs between the runs, and the argument's
            values; it returns the node that computes the argument, or None if none does.
        reason: the reason in the error for any other difference.

    Raises:
        UntraceableError: the runs make different calls, or a number that differs can't be computed.
    """
    _Merge(one, others, numbers, reason).run()


class _Merge:
    def __init__(self, one: Recording, others: Sequence[Recording], numbers: Numbers, reason: str) -> None:
        self.one, self.others, self.numbers, self.reason = one, others, numbers, reason
        self.same: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        nodes, others = list(self.one.graph.nodes), [list(other.graph.nodes) for other in self.others]
        pairs = list(zip(nodes, others[0], strict=False)) if len(others) == 1 else []
        found = [(runs[0], cuts(*runs)) for runs in zip(nodes, *others, strict=False)]
        turned = [(node, turns(node, other)) for node, other in pairs]
        for node, *twins in zip(nodes, *others, strict=False):
            if any(node.op != twin.op or node.target != twin.target for twin in twins):
                raise self._refused(next((n for n in (node, *twins) if "where" in n.meta), node))
            self.same.update((twin, node) for twin in twins)
            if node.op == "get_attr" and node.target in self.one.constants and node.users:
                self._check_constant(node)
            if node.op == "call_method" and node.target in ("view", "reshape") and "shape" in node.meta:
                self._reshape(node, twins)
            else:
                node.args = self._fit(node, node.args, *(twin.args for twin in twins))
                node.kwargs = self._fit(node, node.kwargs, *(twin.kwargs for twin in twins))
        if any(len(nodes) != len(other) for other in others):
            raise self._refused(nodes[min(len(nodes), *map(len, others)) - 1])
        for node, turn in turned:
            if turn is not None:
                self._turn(node, *turn)
        for node, pieces in found:
            if pieces is not None:
                self._slice(node, *pieces)

    def _slice(self, node: fx.Node, axis: int, ends: Sequence[tuple[int, ...]]) -> None:
        """Writes the pieces of a chunk or split as slices, since torch's exporter would fix their number."""
        try:
            stops = [self._number(node, *values) for values in ends]
        except UntraceableError:
            if len(self.others) == 1:
                raise
            return  # along another axis than the batch, pieces may have sizes that no node computes
        starts = [0, *stops[:-1]]
        for piece in list(node.users):
            start, stop = starts[piece.args[1]], stops[piece.args[1]]  # type: ignore[index]
            piece.args = (node.args[0], (*[slice(None)] * axis, slice(start, stop)))

    def _turn(self, node: fx.Node, axis: int, first: tuple[int, int]) -> None:
        """Writes a `roll` by a fraction of the batch as a Cat of two slices."""
        place, whole = self._number(node, *first), (slice(None),) * axis
        with self.one.graph.inserting_before(node):
            ends = [slice(place, None), slice(None, place)]
            parts = [
                self.one.graph.call_function(operator.getitem, (node.args[0], (*whole, end))) for end in ends
            ]
        for part in parts:
            part.meta |= {key: value for key, value in node.meta.items() if key != "shape"}
        node.op, node.target, node.args, node.kwargs = "call_function", torch.cat, (parts, axis), {}

    def _refused(self, node: fx.Node, reason: str = "") -> UntraceableError:
        stack = node.meta.get("nn_module_stack") or {}
        return UntraceableError(
            reason or self.reason, node.meta.get("where", ("", 0)), next(reversed(stack), ""), WHOLE_BATCH
        )

    def _check_constant(self, node: fx.Node) -> None:
        mine = self.one.constants.get(str(node.target))
        for other in self.others:
            theirs = other.constants.get(str(node.target))
            if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise self._refused(
                    node, "a tensor made outside of torch's functions depends on the size of the inputs"
                )
            if not torch.equal(mine.nan_to_num(), theirs.nan_to_num()):
                raise self._refused(
                    node, "a tensor made outside of torch's functions depends on the inputs or on their size"
                )

    def _reshape(self, node: fx.Node, others: Sequence[fx.Node]) -> None:
        """Writes sizes that are the same in all runs as numbers, and the others as nodes that compute them or one -1.

        A -1 for a size that is the same becomes a number too, since torch's exporter would infer it from the shape
        of the input, which goes wrong after a bidirectional LSTM.
        """
        shapes = [node.meta["shape"], *(other.meta["shape"] for other in others)]
        if len(node.args) > 1 and isinstance(node.args[1], torch.dtype):
            return
        if len({len(shape) for shape in shapes}) > 1:
            raise self._refused(node)
        given = _given_shape(node)
        sizes = list(zip(*shapes, strict=True))
        differing = [i for i, values in enumerate(sizes) if len(set(values)) > 1]
        computed = [i for i in differing if isinstance(given.get(i), fx.Node)]
        left = [i for i in differing if i not in computed]
        free = left or computed
        rest = {
            i: self._number(node, *sizes[i]) if i in left else given[i] for i in differing if len(free) > 1
        }
        if len(free) == 1:
            rest = {i: given[i] for i in computed if i not in free} | {free[0]: -1}
        elif (inferred := next((i for i, size in given.items() if size == -1), None)) in differing:
            rest[inferred] = -1
        node.args = (node.args[0], *(rest.get(i, size) for i, size in enumerate(shapes[0])))
        node.kwargs = {}

    def _fit(self, node: fx.Node, mine: Any, *theirs: Any) -> Any:
        if isinstance(mine, fx.Node):
            if any(self.same.get(one) is not mine for one in theirs):
                raise self._refused(node)
            return mine
        if isinstance(mine, (tuple, list)):
            if any(not isinstance(one, (tuple, list)) or len(mine) != len(one) for one in theirs):
                raise self._refused(node)
            return type(mine)(self._fit(node, *parts) for parts in zip(mine, *theirs, strict=True))
        if isinstance(mine, dict):
            return {key: self._fit(node, value, *(one[key] for one in theirs)) for key, value in mine.items()}
        if isinstance(mine, slice):
            ends = [(one.start, one.stop, one.step) for one in (mine, *theirs)]
            return slice(*(self._fit(node, *parts) for parts in zip(*ends, strict=True)))
        return self._number(node, mine, *theirs)

    def _number(self, node: fx.Node, mine: Any, *theirs: Any) -> Any:
        if all(mine == one or (mine != mine and one != one) for one in theirs):  # noqa: PLR0124  NaNs
            return mine
        values = (mine, *theirs)
        found = self.numbers(node, values) if all(type(one) is int for one in values) else None
        if found is None:
            raise self._refused(node)
        return found


def _given_shape(node: fx.Node) -> dict[int, Any]:
    """Returns the sizes in the arguments of a `view` or `reshape`, by axis."""
    given = node.args[1:] or tuple(node.kwargs.values())[:1]
    shape = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return dict(enumerate(shape))


class _OfTheBatch:
    """Computes numbers that differ between two runs as linear functions of batch size / `factor`.

    `divides` becomes true if a number can't be computed without this division.
    """

    def __init__(self, graph: fx.Graph, sizes: tuple[int, int], axis: tuple[int, int], factor: int) -> None:
        self.graph, self.sizes, self.axis, self.factor = graph, sizes, axis, factor
        self.divides = False
        self.expressions: dict[tuple[int, int], fx.Node] = {}

    def __call__(self, node: fx.Node, values: tuple[int, ...]) -> fx.Node | None:
        slope, rest = divmod(values[1] - values[0], self.sizes[1] - self.sizes[0])
        return None if rest else self._expression(slope, values[0] - slope * self.sizes[0])

    def _expression(self, slope: int, constant: int) -> fx.Node:
        """Returns the node of `size · slope / factor + constant`, which is made once, right after the inputs."""
        if (slope, constant) in self.expressions:
            return self.expressions[slope, constant]
        graph = self.graph
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        if (slope, constant) == (self.factor, 0):
            with graph.inserting_after(inputs[-1]):
                node = graph.call_method("size", (inputs[self.axis[0]], self.axis[1]))
        elif (slope, constant) == (1, 0):
            size = self._expression(self.factor, 0)
            self.divides = True
            with graph.inserting_after(size):
                node = graph.call_function(operator.floordiv, (size, self.factor))
        elif constant == 0 and slope % self.factor == 0:
            size = self._expression(self.factor, 0)
            with graph.inserting_after(size):
                node = graph.call_function(operator.mul, (size, slope // self.factor))
        elif constant == 0:
            size = self._expression(1, 0)
            with graph.inserting_after(size):
                node = graph.call_function(operator.mul, (size, slope))
        else:
            before = self._expression(slope, 0)
            with graph.inserting_after(before):
                node = graph.call_function(operator.add, (before, constant))
        self.expressions[slope, constant] = node
        return node
