"""Two runs with batches of different size become one graph for any: what differs is a function of the size.

Each run knows its sizes as plain numbers, 2·49 in one and 3·49 in the other. The two graphs have the same nodes, or the
batch decides what is computed, which is refused. Where a number differs it is written as `size · a + b`, in
`reshape` and `view` as -1.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from qatkit.graph.capture.calls import WHOLE_BATCH, UntraceableError
from qatkit.graph.capture.run import Recording

_HOW_MANY = "the size of the batch decides what is computed"


def merge(one: Recording, other: Recording, sizes: tuple[int, int], axis: tuple[int, int]) -> None:
    """Makes the graph of `one` right for any size of the batch.

    Args:
        sizes: of the batch in the two runs.
        axis: which input has the batch, and along which of its axes.

    Raises:
        UntraceableError: what can't be written as a function of the size.
    """
    _Merge(one, other, sizes, axis).run()


class _Merge:
    def __init__(
        self, one: Recording, other: Recording, sizes: tuple[int, int], axis: tuple[int, int]
    ) -> None:
        self.one, self.other, self.sizes, self.axis = one, other, sizes, axis
        self.expressions: dict[tuple[int, int], fx.Node] = {}
        self.same: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        nodes, others = list(self.one.graph.nodes), list(self.other.graph.nodes)
        for node, other in zip(nodes, others, strict=False):
            if node.op != other.op or node.target != other.target:
                raise self._refused(node)
            self.same[other] = node
            if node.op == "get_attr" and node.target in self.one.constants and node.users:
                self._check_constant(node)
            if node.op == "call_method" and node.target in ("view", "reshape") and "shape" in node.meta:
                self._reshape(node, other)
            else:
                node.args = self._fit(node, node.args, other.args)
                node.kwargs = self._fit(node, node.kwargs, other.kwargs)
        if len(nodes) != len(others):
            raise self._refused(nodes[min(len(nodes), len(others)) - 1])

    def _refused(self, node: fx.Node, reason: str = _HOW_MANY) -> UntraceableError:
        stack = node.meta.get("nn_module_stack") or {}
        return UntraceableError(
            reason, node.meta.get("where", ("", 0)), next(reversed(stack), ""), WHOLE_BATCH
        )

    def _check_constant(self, node: fx.Node) -> None:
        mine, theirs = (run.constants.get(str(node.target)) for run in (self.one, self.other))
        if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise self._refused(
                node, "a tensor made outside of torch's functions depends on the size of the batch"
            )
        if not torch.equal(mine.nan_to_num(), theirs.nan_to_num()):
            raise self._refused(node, "a tensor made outside of torch depends on the inputs or on the batch")

    def _reshape(self, node: fx.Node, other: fx.Node) -> None:
        """One size that differs is -1, whatever was given; the others are numbers."""
        shape, theirs = node.meta["shape"], other.meta["shape"]
        if len(node.args) > 1 and isinstance(node.args[1], torch.dtype):
            return
        differing = [i for i, (a, b) in enumerate(zip(shape, theirs, strict=False)) if a != b]
        if len(shape) != len(theirs):
            raise self._refused(node)
        if len(differing) > 1:
            node.args = (
                node.args[0],
                *(self._number(node, a, b) for a, b in zip(shape, theirs, strict=True)),
            )
        else:
            node.args = (node.args[0], *(-1 if i in differing else size for i, size in enumerate(shape)))
        node.kwargs = {}

    def _fit(self, node: fx.Node, mine: Any, theirs: Any) -> Any:
        if isinstance(mine, fx.Node):
            if self.same.get(theirs) is not mine:
                raise self._refused(node)
            return mine
        if isinstance(mine, (tuple, list)):
            if not isinstance(theirs, (tuple, list)) or len(mine) != len(theirs):
                raise self._refused(node)
            return type(mine)(self._fit(node, a, b) for a, b in zip(mine, theirs, strict=True))
        if isinstance(mine, dict):
            return {key: self._fit(node, value, theirs[key]) for key, value in mine.items()}
        if isinstance(mine, slice):
            ends = ((mine.start, theirs.start), (mine.stop, theirs.stop), (mine.step, theirs.step))
            return slice(*(self._fit(node, a, b) for a, b in ends))
        return self._number(node, mine, theirs)

    def _number(self, node: fx.Node, mine: Any, theirs: Any) -> Any:
        if mine == theirs or (mine != mine and theirs != theirs):  # noqa: PLR0124  two NaNs
            return mine
        if type(mine) is not int or type(theirs) is not int:
            raise self._refused(node)
        slope, rest = divmod(theirs - mine, self.sizes[1] - self.sizes[0])
        if rest:
            raise self._refused(node)
        return self._expression(slope, mine - slope * self.sizes[0])

    def _expression(self, slope: int, constant: int) -> fx.Node:
        """`size · slope + constant`, once a graph, right behind the inputs."""
        if (slope, constant) in self.expressions:
            return self.expressions[slope, constant]
        graph = self.one.graph
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        if (slope, constant) == (1, 0):
            with graph.inserting_after(inputs[-1]):
                node = graph.call_method("size", (inputs[self.axis[0]], self.axis[1]))
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
