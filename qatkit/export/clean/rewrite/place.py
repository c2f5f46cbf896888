"""Inserts operators and replaces nodes by others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit.export.clean.graphs import taken_names
from qatkit.export.for_ort_tools import add_constant
from qatkit.export.hidden_names import free_name
from qatkit.export.matching import number
from qatkit.verify.graph_view import constant, operand


def put(
    node: ir.Node,
    operator: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Replaces a node with one output by an operator; the new output gets the name and type of the old output."""
    new = ir.node(operator, inputs, attributes or {}, name=node.name)
    take_over(node.outputs[0], new)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def take_over(old: ir.Value, new: ir.Node) -> None:
    """Inserts a node after the one that computes a tensor; the new output gets the tensor's readers and name."""
    node, result, name = old.producer(), new.outputs[0], old.name
    assert node is not None and node.graph is not None
    result.shape, result.type = old.shape, old.type
    node.graph.insert_after(node, new)
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    old.name, result.name = None, name


def before(
    model: ir.Model,
    node: ir.Node,
    operator: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
) -> ir.Value:
    """Inserts an operator before a node, and returns the operator's output."""
    new = ir.node(operator, inputs, attributes or {})
    base = f"{node.outputs[0].name}/{operator}"
    new.outputs[0].name = free_name(base, taken_names(model))
    new.name = new.outputs[0].name
    first = next((value for value in inputs if value is not None), None)
    new.outputs[0].type = None if first is None else first.type
    assert node.graph is not None
    node.graph.insert_before(node, new)
    return new.outputs[0]


def held(model: ir.Model, node: ir.Node, what: str, array: NDArray[Any]) -> ir.Value:
    """Adds a constant to a node's graph and returns it; its name is NODE_OUTPUT/`what`."""
    name = free_name(f"{node.outputs[0].name}/{what}", taken_names(model))
    assert node.graph is not None
    return add_constant(node.graph, name, array)


def rank(value: ir.Value | None) -> int | None:
    """Returns the number of axes of a tensor; None if it is unknown."""
    return None if value is None or value.shape is None else len(value.shape)


def size(value: ir.Value | None, axis: int) -> int | None:
    """Returns the size of an axis; None if it is dynamic or unknown."""
    if value is None or value.shape is None:
        return None
    found = value.shape[axis]
    return found if isinstance(found, int) else None


def axes_of(node: ir.Node) -> tuple[int, ...] | None:
    """Returns the axes of a reduction, as indices from 0; None if the axes or the rank are unknown."""
    axes = constant(operand(node, 1)) if len(node.inputs) > 1 else None
    if axes is None and "axes" in node.attributes:
        axes = np.asarray(node.attributes["axes"].as_ints())
    ranks = rank(operand(node, 0))
    if axes is None or ranks is None:
        return None
    return tuple(sorted(int(axis) % ranks for axis in axes.reshape(-1)))


def is_number(value: ir.Value | None, wanted: float) -> bool:
    """Returns whether a value is a constant equal to `wanted`."""
    return number(value) == wanted
