"""One pass of rules over an ONNX graph: each looks at one node and changes it in place, or builds its replacement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir import tape

# What a rule returns replaces the node's single output; None means "changed in place, or nothing to do".
Rule = Callable[[ir.Node, tape.Tape], "ir.Value | None"]


def rewrite(graph: ir.Graph, rules: Mapping[str, Sequence[Rule]]) -> None:
    """Applies to every node that is there now the rules of its operator, up to the first that replaces it."""
    for node in list(graph):
        for rule in rules.get(node.op_type, ()):
            builder = tape.Tape()
            new = rule(node, builder)
            for value in builder.initializers:
                graph.register_initializer(value)
            if new is not None:
                _replace(graph, node, builder, new)
                break


def _replace(graph: ir.Graph, node: ir.Node, builder: tape.Tape, new: ir.Value) -> None:
    """Puts what was built into the node's place, under its scope."""
    old = node.outputs[0]
    new.name, new.shape, new.type = old.name, old.shape, old.type
    for created in builder.nodes:
        created.metadata_props.update(node.metadata_props)
    ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, [old], [new])


def new_constant(builder: tape.Tape, node: ir.Node, what: str, array: NDArray[Any]) -> ir.Value:
    """An initializer for what replaces `node`, named after its output."""
    name = f"{node.outputs[0].name}/{what}"
    return builder.initializer(ir.tensor(array, name=name), name=name)


def new_int64(builder: tape.Tape, node: ir.Node, what: str, *values: int) -> ir.Value:
    """An initializer of int64 [len(values)]."""
    return new_constant(builder, node, what, np.array(values, np.int64))


def ints(value: ir.Value | None) -> list[int] | None:
    """Contents of a constant integer input."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(v) for v in tensor.numpy().reshape(-1)]
