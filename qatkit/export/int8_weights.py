"""Stores weights in int8 for operators that compute in float, with nodes that dequantize them.

    Conv              [out, in/groups, ...]          one scale per output channel
    ConvTranspose     [in, out/groups, ...]          one scale per output channel: along axis 1, or with groups along
                                                     two axes of [groups, in/groups, out/groups, ...]
    Gemm, MatMul      a matrix                       one scale per column, or per row if it is transposed
    MatMul            a stack [..., in, out]         one scale per column of each matrix
    LSTM, GRU, RNN    W, R [directions, gates, ...]  one scale per row, as in `qatkit.graph.convert.recurrent_modules`

Scales along one axis become a DequantizeLinear. Scales along several axes become a Cast and a Mul, which ONNX Runtime
computes once, when it loads the file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit.export.for_ort_tools import add_constant, recurrent_weights, weights
from qatkit.export.hidden_names import free_name, tensor_names
from qatkit.export.levelled_filters import row_ranges
from qatkit.verify.graph_view import constant, operand

_INT8_MAX = 127


@dataclass(frozen=True)
class Scales:
    """The layout of a weight's scales.

    Attributes:
        shape: the shape of the int8 tensor; the dequantized weight is reshaped to its own shape.
        axes: the axes of `shape` along which the scale varies.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]


def quantize_weights(model: ir.Model, without: Collection[str] = ()) -> None:
    """Replaces the weights of Conv, ConvTranspose, Gemm, MatMul and recurrent operators by int8 weights, in place.

    A weight that would not become smaller with its scales stays float.

    Args:
        model: the model, changed in place.
        without: the names of operators whose weights stay float.
    """
    found = {value: _layout(value, axis) for value, axis in weights(model).items()}
    _replace(model, found | _rows(model), without)


def quantize_recurrent(model: ir.Model, without: Collection[str] = ()) -> None:
    """Replaces the weights of LSTM, GRU and RNN by int8 weights, in place; otherwise like `quantize_weights`."""
    _replace(model, _rows(model), without)


def _replace(model: ir.Model, found: dict[ir.Value, Scales], without: Collection[str]) -> None:
    taken = tensor_names(model)
    chosen = {
        value: scales
        for value, scales in found.items()
        if not any(node.name in without for node in value.consumers())
    }
    nodes = [node for value, scales in chosen.items() for node in _in_int8(model.graph, value, scales, taken)]
    if nodes:
        model.graph.insert_before(model.graph[0], nodes)


def _rows(model: ir.Model) -> dict[ir.Value, Scales]:
    """Returns the layouts of W and R of LSTM, GRU and RNN, with one scale per row."""
    return {value: Scales(_array(value).shape, (0, 1)) for value in recurrent_weights(model)}


def _array(value: ir.Value) -> NDArray[Any]:
    held = constant(value)
    assert held is not None, value
    return held


def _layout(value: ir.Value, axis: int) -> Scales:
    """Returns the layout of the scales for a weight from `weights`, whose output channels are along `axis`."""
    shape = _array(value).shape
    alike = [node for node in value.consumers() if operand(node, 1) is value or operand(node, 0) is value]
    node = next((one for one in alike if one.op_type in ("Conv", "ConvTranspose")), alike[0])
    groups = node.attributes.get_int("group", 1)
    if node.op_type == "ConvTranspose" and groups > 1:
        if groups == shape[0] and shape[1] == 1:
            return Scales(shape, (0,))
        return Scales((groups, shape[0] // groups, *shape[1:]), (0, 2))
    if node.op_type == "MatMul" and len(shape) > 2:
        return Scales(shape, (*range(len(shape) - 2), axis))
    return Scales(shape, (axis,))


def _in_int8(graph: ir.Graph, value: ir.Value, scales: Scales, taken: set[str | None]) -> list[ir.Node]:
    """Replaces a weight by int8 values, and returns the nodes that dequantize it.

    The last node's output has the weight's name. If the file would not become smaller, nothing changes and the list is
    empty.
    """
    name, held = str(value.name), _array(value)
    values = held.reshape(scales.shape)
    scale = row_ranges(values, scales.axes) / np.float32(_INT8_MAX)
    if values.size + scale.nbytes >= values.nbytes:
        return []
    rounded = np.clip(np.rint(values / scale), -_INT8_MAX, _INT8_MAX).astype(np.int8)
    graph.initializers.pop(name)
    weight = ir.Value(name=name, shape=value.shape, type=value.type)
    value.replace_all_uses_with(weight, replace_graph_outputs=True)
    integers = add_constant(graph, free_name(f"{name}_quantized", taken), rounded)
    if len(scales.axes) == 1:
        parts = [
            integers,
            add_constant(graph, free_name(f"{name}_scale", taken), scale.reshape(-1)),
            add_constant(graph, free_name(f"{name}_zero_point", taken), np.zeros(scale.size, np.int8)),
        ]
        axis = {"axis": scales.axes[0]}
        return [ir.node("DequantizeLinear", parts, axis, outputs=[weight], name=f"{name}_dequantize")]
    factor = add_constant(graph, free_name(f"{name}_scale", taken), scale)
    whole = ir.Value(name=free_name(f"{name}_float", taken))
    nodes = [ir.node("Cast", [integers], {"to": ir.DataType.FLOAT}, outputs=[whole], name=f"{name}_cast")]
    if scales.shape == held.shape:
        return [*nodes, ir.node("Mul", [whole, factor], outputs=[weight], name=f"{name}_multiply")]
    product = ir.Value(name=free_name(f"{name}_product", taken))
    shape = add_constant(graph, free_name(f"{name}_shape", taken), np.array(held.shape, np.int64))
    nodes.append(ir.node("Mul", [whole, factor], outputs=[product], name=f"{name}_multiply"))
    return [*nodes, ir.node("Reshape", [product, shape], outputs=[weight], name=f"{name}_reshape")]
