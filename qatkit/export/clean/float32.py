"""Converts a float16 file to float32: weights, constants, casts, inputs and outputs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qatkit.export.clean.graphs import graphs, values
from qatkit.export.clean.shapes import infer

_HALF, _FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
_TYPES = ("to", "dtype")  # attributes that contain an element type


def to_float32(model: ir.Model) -> list[str]:
    """Replaces float16 by float32 throughout the model, in place; returns a line for each kind of change."""
    infer(model)  # a Cast that does nothing is recognized by the type of its input
    counts = {"stored tensors": 0, "types": 0, "casts": 0}
    for graph in graphs(model.graph):
        for value in values(graph):
            if value.dtype == _HALF:
                value.type = _as_float(value.type)
                counts["types"] += 1
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype == _HALF:
                value.const_value = _widened(value.const_value)
                value.type = ir.TensorType(_FLOAT)
                counts["stored tensors"] += 1
        for node in graph:
            for attribute in list(node.attributes.values()):
                counts["casts"] += _widen(node, attribute)
    removed = sum(_drop_casts(graph) for graph in graphs(model.graph))
    changed = [f"{what} changed to float32: {count}" for what, count in counts.items() if count]
    return changed + ([f"Cast nodes removed: {removed}"] if removed else [])


def _as_float(kind: ir.TypeProtocol | None) -> ir.TypeProtocol:
    """Returns the same type with float32 elements; sequences and optional tensors are converted too."""
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        return type(kind)(_as_float(kind.elem_type))
    return ir.TensorType(_FLOAT)


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _widen(node: ir.Node, attribute: ir.Attr) -> bool:
    """Changes an attribute that contains float16 values, or names float16 as a type; returns whether it did."""
    if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _HALF:
        node.attributes.add(ir.AttrTensor(attribute.name, _widened(attribute.as_tensor())))
        return True
    if (
        attribute.type == ir.AttributeType.INT
        and attribute.name in _TYPES
        and attribute.as_int() == _HALF.value
    ):
        node.attributes.add(ir.AttrInt64(attribute.name, _FLOAT.value))
        return True
    return False


def _drop_casts(graph: ir.Graph) -> int:
    """Removes casts from float32 to float32, except those that compute an output of the graph."""
    dropped = 0
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Cast" and not node.domain else None
        if source is None or source.dtype != _FLOAT or node.attributes["to"].as_int() != _FLOAT.value:
            continue
        if node.outputs[0].is_graph_output():
            continue
        node.outputs[0].replace_all_uses_with(source)
        graph.remove(node, safe=True)
        dropped += 1
    return dropped
