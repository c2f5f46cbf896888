"""Quantizes the tables of Embeddings to int8, with one scale per row.

    table [rows, columns], ids ── Gather ──>   becomes   int8 table, ids ── Gather ── Cast ─┐
                                                                scales, ids ── Gather ──────┴─ Mul ──>

Only the rows that are read are dequantized. A table that another operator also reads, such as a MatMul, stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from qatkit.export.for_ort_tools import add_constant
from qatkit.export.hidden_names import free_name, tensor_names
from qatkit.export.levelled_filters import row_ranges
from qatkit.verify.graph_view import constant, operand, stored

_INT8_MAX = 127
_LEAST = 1 << 16  # smallest size in bytes for which the additional operators are worth it


def tables(model: ir.Model) -> list[ir.Value]:
    """Returns the float matrices of at least 64 KiB that are read only by Gathers of rows."""
    found = dict.fromkeys(
        value
        for node in model.graph
        if node.op_type == "Gather" and (value := operand(node, 0)) is not None and _is_table(value)
    )
    return [value for value in found if all(_reads_rows(use.node, use.idx) for use in value.uses())]


def quantize_tables(model: ir.Model, without: Collection[str] = ()) -> None:
    """Replaces the tables of a model by int8 tables, in place; a table that a branch or loop reads stays float.

    Args:
        model: the model, changed in place.
        without: the names of operators whose tables stay float.
    """
    taken = tensor_names(model)
    for value in tables(model):
        readers = list(value.consumers())
        if any(node.graph is not model.graph or node.name in without for node in readers):
            continue
        name, held = str(value.name), constant(value)
        assert held is not None
        scale = row_ranges(held, (0,)) / np.float32(_INT8_MAX)
        rounded = np.clip(np.rint(held / scale), -_INT8_MAX, _INT8_MAX).astype(np.int8)
        integers = add_constant(model.graph, free_name(f"{name}_quantized", taken), rounded)
        scales = add_constant(model.graph, free_name(f"{name}_scale", taken), scale.reshape(-1, 1))
        for node in readers:
            _dequantize_rows(model.graph, node, integers, scales)
        model.graph.initializers.pop(name)


def _is_table(value: ir.Value) -> bool:
    tensor = stored(value)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or value.is_graph_output():
        return False
    return len(tensor.shape) == 2 and tensor.nbytes >= _LEAST


def _reads_rows(node: ir.Node, index: int) -> bool:
    return (
        node.op_type == "Gather"
        and not node.domain
        and index == 0
        and node.attributes.get_int("axis", 0) in (0, -2)
    )


def _dequantize_rows(graph: ir.Graph, node: ir.Node, integers: ir.Value, scales: ir.Value) -> None:
    """Replaces a Gather of a table by two Gathers (integers and scales), a Cast and a Mul."""
    ids, result = node.inputs[1], node.outputs[0]
    parts = [
        ir.node("Gather", [table, ids], {"axis": 0}, name=f"{node.name}_{part}")
        for table, part in ((integers, "int8"), (scales, "scale"))
    ]
    whole = ir.node("Cast", [parts[0].outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{node.name}_cast")
    product = ir.node("Mul", [whole.outputs[0], parts[1].outputs[0]], name=f"{node.name}_multiply")
    graph.insert_before(node, [*parts, whole, product])
    made, name, is_output = product.outputs[0], result.name, result.is_graph_output()
    made.shape, made.type = result.shape, result.type
    result.replace_all_uses_with(made, replace_graph_outputs=is_output)
    graph.remove(node, safe=True)
    made.name = name
