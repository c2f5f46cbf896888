"""Merges the sizes of several runs.

A number that differs between the runs is computed as a size of a tensor, or a multiple of one. A size that is the
same in all runs becomes a number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from qatkit.graph.capture.calls import UntraceableError

# Functions of torchvision for windows and relative positions, which are rewritten for the sizes of the example only
# (`qatkit.graph.attention`).
_OF_ONE_SIZE = ("shifted_window_attention", "_add_rel_pos", "_compute_attention_mask")


def shape_in_run(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of a node's tensor in the recorded run; () if its value is not a tensor."""
    return tuple(node.meta.get("shape", ()))


class Shapes:
    """The function that expresses numbers that differ between runs as sizes of tensors, or as multiples of sizes.

    A size that equals the number is preferred to a multiple. Among several, those of the node's own inputs
    come first, then those of the latest tensors before the node.

    Args:
        one: the graph in which the numbers are computed.
        others: graphs of runs with inputs of other sizes.
    """

    def __init__(self, one: fx.Graph, others: Sequence[fx.Graph]) -> None:
        self._graph, self._runs = one, 1 + len(others)
        self._twins = [dict(zip(one.nodes, other.nodes, strict=False)) for other in others]
        self._order = {node: i for i, node in enumerate(one.nodes)}
        self._made: dict[tuple[fx.Node, int, int], fx.Node] = {}

    def __call__(self, node: fx.Node, values: tuple[int, ...]) -> fx.Node | None:
        """Returns the node for an argument of `node` with these `values` in the runs; None if no size matches."""
        before = [n for n, place in self._order.items() if place < self._order.get(node, 0)]
        found = [
            (source, axis, factor)
            for source in (*node.all_input_nodes, *reversed(before))
            for axis, sizes in self._sizes(source)
            if (factor := _factor(values, sizes))
        ]
        exact = [one for one in found if one[2] == 1]
        return self._computed(*(exact or found)[0]) if found else None

    def _sizes(self, node: fx.Node) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields each axis of a tensor whose size differs between the runs, with its size in each run."""
        shapes = [shape_in_run(node), *(shape_in_run(twin[node]) for twin in self._twins if node in twin)]
        if len(shapes) == self._runs and len({len(shape) for shape in shapes}) == 1:
            yield from (
                (i, sizes) for i, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1
            )

    def _computed(self, source: fx.Node, axis: int, factor: int) -> fx.Node:
        if (source, axis, factor) not in self._made:
            with self._graph.inserting_after(source):
                size = self._graph.call_method("size", (source, axis))
            if factor > 1:
                with self._graph.inserting_after(size):
                    size = self._graph.call_function(operator.mul, (size, factor))
            self._made[source, axis, factor] = size
        return self._made[source, axis, factor]


def _factor(values: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns the positive integer that gives each value when multiplied by its size; 0 if none fits all runs."""
    factors = {divmod(value, size) if size else (0, 1) for value, size in zip(values, sizes, strict=True)}
    factor, rest = next(iter(factors))
    return factor if len(factors) == 1 and rest == 0 and factor > 0 else 0


def fold_fixed(graph: fx.Graph, values: Sequence[Mapping[fx.Node, int]]) -> None:
    """Turns sizes that are the same in all runs into numbers, and reads the others as late as possible.

    A number that is computed from other sizes stays even if it is the same in all runs, such as a difference of 0,
    since it may be different at other sizes. A size is read at the end of a chain of nodes with equal shapes: a
    convolution whose size is read would have a second reader, and no BatchNorm could be fused into it.

    Args:
        graph: the merged graph.
        values: for each run, the value of each node that computes a size.
    """
    for (node, value), *same in zip(*(list(found.items()) for found in values), strict=False):
        if not any(isinstance(arg, fx.Node) and _is_size(arg) for arg in node.args) and all(
            other == value for _, other in same
        ):
            _replace(node, value)
    for node in reversed(list(graph.nodes)):
        if _is_size(node) and not node.users:
            graph.erase_node(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.op == "call_method" and n.target == "size" and len(n.args) == 2]:
        first = min((order[user] for user in node.users if user in order), default=len(order))
        source: Any = node.args[0]
        while len(rest := [user for user in source.users if not _is_size(user)]) == 1:
            following = rest[0]
            if shape_in_run(following) != shape_in_run(source) or order.get(following, first) >= first:
                break
            source = following
        if source is not node.args[0]:
            source.append(node)
            node.args = (source, node.args[1])


def _is_size(node: fx.Node) -> bool:
    """Returns whether a node reads a size or computes an integer from sizes."""
    if node.op == "call_method" and node.target == "size":
        return len(node.args) == 2
    arithmetic = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg)
    known = (*(arg for arg in node.args),)
    return (
        node.op == "call_function"
        and node.target in arithmetic
        and all(isinstance(arg, int) or (isinstance(arg, fx.Node) and _is_size(arg)) for arg in known)
    )


def check_forms(one: fx.Graph, others: Sequence[fx.Graph]) -> None:
    """Rejects operators that are rewritten for the sizes of the example only.

    These are Swin's windows, MViT's relative positions, and adaptive pools to a fixed size other than 1.

    Raises:
        UntraceableError: the height, width or number of frames of such an operator's input differs between the runs.
    """
    for nodes in zip(one.nodes, *(other.nodes for other in others), strict=False):
        node, name = nodes[0], _name_of(nodes[0])
        if not name.lower().startswith((*_OF_ONE_SIZE, "adaptive")):
            continue
        if not all(n.all_input_nodes and _name_of(n) == name for n in nodes):
            return  # the graphs differ; merging them gives a better message
        before = list(zip(*(shape_in_run(n.all_input_nodes[0])[2:] for n in nodes), strict=False))
        after = list(zip(*(shape_in_run(n)[2:] for n in nodes), strict=False))
        pool = name.lower().startswith("adaptive")
        if any(
            len(set(given)) > 1 and (not pool or (set(made) != {1} and len(set(made)) == 1))
            for given, made in zip(before, after, strict=False)
        ):
            stack = node.meta.get("nn_module_stack") or {}
            reason = f"{name.strip('_')} works only at one size of its input"
            raise UntraceableError(reason, node.meta["where"], next(reversed(stack), ""), "")


def _name_of(node: fx.Node) -> str:
    """Returns the name of the function that a node calls, or the type of its module."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if node.op == "call_module" and stack:
        return str(stack[-1][1].__name__)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def sizes_in_run(graph: fx.Graph) -> dict[fx.Node, int]:
    """Returns the value of each node that computes a size, in the run that the graph was recorded in."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if not _is_size(node):
            continue
        if node.op == "call_method":
            shape, axis = shape_in_run(node.args[0]), node.args[1]
            if shape:
                found[node] = shape[axis]
        else:
            found[node] = node.target(*(found.get(arg, arg) for arg in node.args))
    return found


def _replace(node: fx.Node, value: int) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)
