"""Specializes a graph with dynamic sizes to the sizes of the example.

Sizes become numbers. Nodes that then depend only on parameters become constants, for example a table of positions that
is resized to the image.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qatkit.graph.nodes import called
from qatkit.graph.placement import constants
from qatkit.graph.sharing import large_tensors
from qatkit.graph.signature import batch_multiple, batch_size, resized

_OF_SIZES = ("getitem", "pad", "constant_pad_nd", "narrow", "reshape", "view", "expand", "repeat")


def at_fixed_sizes(
    graph_module: fx.GraphModule, tensors: Sequence[Tensor], axes: Sequence[int | None]
) -> fx.GraphModule:
    """Returns a copy of a graph that accepts only inputs of the sizes of `tensors`, apart from the batch size.

    Args:
        graph_module: the graph.
        tensors: example inputs of the graph.
        axes: the batch axis of each input, whose size stays dynamic; None if this size is fixed too, or for an input
            without a batch axis.
    """
    found = copy.deepcopy(graph_module, large_tensors(graph_module))
    before, runs = constants(found.graph), [_values(found, tensors)]
    if any(axis is not None for axis in axes):
        more = batch_size(tensors, axes) + batch_multiple(graph_module)
        runs.append(_values(found, resized(tuple(tensors), more, axes)))
    for node, value in runs[0].items():
        if type(value) is int and node.op != "placeholder" and all(run[node] == value for run in runs):
            node.replace_all_uses_with(value)  # type: ignore[arg-type]  # a number may replace a node
    found.graph.eliminate_dead_code()
    made = {n for n in constants(found.graph) - before if isinstance(runs[0][n], Tensor)}
    for number, node in enumerate(n for n in found.graph.nodes if n in made):
        if any(user not in made for user in node.users):
            found.register_buffer(f"_of_fixed_sizes_{number}", runs[0][node].detach())
            with found.graph.inserting_before(node):
                constant = found.graph.get_attr(f"_of_fixed_sizes_{number}")
            node.replace_all_uses_with(constant)
            if runs[0][node].ndim == 0 and not runs[0][node].is_floating_point():
                _read_as_number(constant, int(runs[0][node]))
    found.graph.eliminate_dead_code()
    found.recompile()
    return found


def _read_as_number(constant: fx.Node, value: int) -> None:
    """Replaces a constant tensor by its value where an operator expects a size; the exporter does not read it."""
    for user in list(constant.users):
        if called(user) in _OF_SIZES:
            user.args, user.kwargs = fx.map_arg(
                (user.args, user.kwargs), lambda n: value if n is constant else n
            )


def _values(graph_module: fx.GraphModule, tensors: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """Returns the value that each node computes for the given inputs."""
    values: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    with torch.no_grad():
        Recorder(graph_module, garbage_collect_values=False).run(*tensors)
    return values
