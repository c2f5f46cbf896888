"""Folds constant factors and added vectors into adjacent convolutions where ONNX Runtime's optimizer does not.

It also removes Split and Concat nodes with a single part.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit.export.clean.graphs import graphs, taken_names
from qatkit.export.for_ort_tools import add_constant
from qatkit.export.hidden_names import free_name
from qatkit.verify.graph_view import constant, operand


def join(model: ir.Model, *, exact: bool) -> None:
    """Folds a scalar factor before a Conv into its weights, and a vector added after a ConvTranspose into its bias.

    Split and Concat nodes with a single part are removed.

    Args:
        model: the model, changed in place.
        exact: whether outputs must not change. Then only powers of two are folded, if no weight overflows or becomes
            subnormal, and no added vectors.
    """
    for graph in graphs(model.graph):
        for node in list(graph):
            if node.domain:
                continue
            if _passes(node):
                _drop(graph, node)
            elif node.op_type == "Conv":
                _join_factor(model, graph, node, exact)
            elif node.op_type == "ConvTranspose" and not exact:
                _join_sum(model, graph, node)


def _passes(node: ir.Node) -> bool:
    """Returns whether a node returns its only input unchanged."""
    return (node.op_type == "Split" and len(node.outputs) == 1) or (
        node.op_type == "Concat" and len(node.inputs) == 1
    )


def _drop(graph: ir.Graph, node: ir.Node) -> None:
    """Removes a node and connects its readers to its first input, unless it computes an output of the file."""
    source, made = node.inputs[0], node.outputs[0]
    if source is not None and not made.is_graph_output():
        made.replace_all_uses_with(source)
        graph.remove(node, safe=True)


def _constant_beside(node: ir.Node) -> tuple[ir.Value | None, NDArray[np.floating] | None]:
    """Returns the computed and the constant float operand of a binary node; (None, None) if it lacks either."""
    for index in (0, 1):
        held = constant(operand(node, index))
        other = operand(node, 1 - index)
        if held is not None and other is not None and constant(other) is None and held.dtype.kind == "f":
            return other, held
    return None, None


def _lone(value: ir.Value | None, graph: ir.Graph) -> bool:
    """Returns whether exactly one node of the graph reads a value."""
    if value is None or len(value.uses()) != 1 or value.is_graph_output():
        return False
    return all(node.graph is graph for node in value.consumers())


def _join_factor(model: ir.Model, graph: ir.Graph, conv: ir.Node, exact: bool) -> None:
    product = operand(conv, 0)
    node = None if product is None else product.producer()
    weight = constant(operand(conv, 1))
    if node is None or node.op_type != "Mul" or node.domain or weight is None or not _lone(product, graph):
        return
    source, factor = _constant_beside(node)
    if source is None or factor is None or factor.size != 1 or factor.ndim > 1:
        return
    number = weight.dtype.type(factor.reshape(-1)[0])
    if exact and (np.frexp(np.abs(number))[0] != 0.5 or not _scales_exactly(weight, number)):
        return
    taken = taken_names(model)
    scaled = add_constant(graph, free_name(f"{conv.inputs[1].name}_scaled", taken), weight * number)  # type: ignore[union-attr]
    conv.replace_input_with(0, source)
    conv.replace_input_with(1, scaled)
    graph.remove(node, safe=True)


def _scales_exactly(weight: NDArray[np.floating], number: np.floating) -> bool:
    """Returns whether multiplication by a power of two is exact for all weights (no overflow, no subnormals)."""
    scaled = weight * number
    smallest = np.finfo(weight.dtype).tiny
    return bool(np.isfinite(scaled).all() and (np.abs(scaled[scaled != 0]) >= smallest).all())


def _join_sum(model: ir.Model, graph: ir.Graph, conv: ir.Node) -> None:
    made, weight = conv.outputs[0], constant(operand(conv, 1))
    bias = constant(operand(conv, 2))
    if weight is None or not _lone(made, graph) or (operand(conv, 2) is not None and bias is None):
        return
    node = next(iter(made.consumers()))
    _, added = _constant_beside(node) if node.op_type == "Add" and not node.domain else (None, None)
    channels = weight.shape[1] * conv.attributes.get_int("group", 1)
    if (
        added is None
        or added.shape[-weight.ndim + 1 : -weight.ndim + 2] != (channels,)
        or added.size != channels
    ):
        return
    summed = added.reshape(-1) if bias is None else bias + added.reshape(-1)
    name = free_name(f"{conv.inputs[1].name}_bias", taken_names(model))  # type: ignore[union-attr]
    conv.resize_inputs(3)
    conv.replace_input_with(2, add_constant(graph, name, summed.astype(weight.dtype)))
    result = node.outputs[0]
    made.name, name = f"{made.name}_before", str(result.name)
    made.shape = result.shape or made.shape
    result.replace_all_uses_with(made, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    made.name = name
