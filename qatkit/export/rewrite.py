"""Applies rules to an ONNX graph in one pass: each rule changes one node in place or builds its replacement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir import tape

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
# A rule returns the values that replace the node's outputs, or fewer if nothing reads the last ones. None means that
# the node was changed in place, or that there was nothing to do.
Rule = Callable[[ir.Node, tape.Tape], "ir.Value | Sequence[ir.Value] | None"]


def rewrite(graph: ir.Graph, rules: Mapping[str, Sequence[Rule]], domain: str = "") -> None:
    """Applies rules to every node that the graph has at the start, up to the first rule that replaces the node.

    Branches and loop bodies are rewritten in the same way.

    Args:
        graph: the graph, changed in place.
        rules: the rules for each type of operator, in order.
        domain: the domain of these operators.
    """
    for node in list(graph):
        for inner in subgraphs(node):
            rewrite(inner, rules, domain)
        for rule in rules.get(node.op_type, ()) if node.domain == domain else ():
            builder = tape.Tape()
            new = rule(node, builder)
            for value in builder.initializers:
                graph.register_initializer(value)
            if new is not None:
                _replace(graph, node, builder, [new] if isinstance(new, ir.Value) else list(new))
                break


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Returns the graphs in the attributes of `node`: branches, or the body of a loop."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def _replace(graph: ir.Graph, node: ir.Node, builder: tape.Tape, new: list[ir.Value]) -> None:
    """Replaces a node by the nodes of `builder`, which get its module scope."""
    old = list(node.outputs[: len(new)])
    for before, after in zip(old, new, strict=True):
        after.name, after.shape, after.type = before.name, before.shape, before.type
    for created in builder.nodes:
        created.metadata_props.update(node.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, old, new)


def new_constant(builder: tape.Tape, node: ir.Node, what: str, array: NDArray[Any]) -> ir.Value:
    """Adds an initializer for the replacement of `node`, named after the node's output, and returns it."""
    name = f"{node.outputs[0].name}/{what}"
    return builder.initializer(ir.tensor(array, name=name), name=name)


def new_int64(builder: tape.Tape, node: ir.Node, what: str, *values: int) -> ir.Value:
    """Adds an int64 initializer [len(values)] for the replacement of `node`, and returns it."""
    return new_constant(builder, node, what, np.array(values, np.int64))


def new_scalar(
    builder: tape.Tape, node: ir.Node, what: str, number: float, like: ir.Value | None
) -> ir.Value:
    """Adds an initializer of rank 0 and returns it; it has the type of `like`, or float32 if that is unknown."""
    known = None if like is None else like.dtype
    return new_constant(builder, node, what, np.array(number, np.float32 if known is None else known.numpy()))


def ints(value: ir.Value | None) -> list[int] | None:
    """Returns the values of a constant integer input; None if it is not constant."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(v) for v in tensor.numpy().reshape(-1)]


def given(node: ir.Node, index: int) -> ir.Value | None:
    """Returns the input at `index`; None if the node has no such input."""
    return node.inputs[index] if index < len(node.inputs) else None


def length(value: ir.Value | None, axis: int) -> int | None:
    """Returns the size of an axis; None if it is unknown."""
    shape = None if value is None else value.shape
    found = None if shape is None or not -len(shape) <= axis < len(shape) else shape[axis]
    return found if isinstance(found, int) else None
