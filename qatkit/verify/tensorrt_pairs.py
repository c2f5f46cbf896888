"""What a QDQ file asks of a runtime other than ONNX Runtime, read off the file alone.

Whether TensorRT runs an operator in int8 is decided where TensorRT builds its engine. What can be told before is
whether the file asks for it in the form that TensorRT takes: symmetric int8 with zero point 0 everywhere,
weights stored in int8, float biases, and pairs on both operands of every Conv, Gemm and MatMul with a weight.
Source: NVIDIA TensorRT developer guide, "Explicit Quantization"; ONNX-TensorRT's list of operators.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from qatkit.verify.graph_view import GraphView, Weight

_PAIRS = ("QuantizeLinear", "DequantizeLinear")


def asks_for_int8(view: GraphView, node: onnx.NodeProto) -> str:
    """Why a matrix operator of the file will run in float; empty when both operands are int8."""
    weight = view.weight_of(node)
    if weight is None:
        return "activation by activation, without pairs on its inputs"
    if weight.dequantize is None:
        return "its weight is float in the file (no DequantizeLinear)"
    data = next(name for name in node.input[:2] if view.weight(name) != weight)
    source = view.producer.get(data)
    if source is None or source.op_type != "DequantizeLinear":
        return "its input has no DequantizeLinear"
    return ""


def broken_pairs(view: GraphView) -> list[str]:
    """One line for everything that TensorRT refuses to parse or to fuse, whatever the operator."""
    lines = []
    for node in view.nodes:
        if node.op_type in _PAIRS and (wrong := _wrong_type(view, node)):
            lines.append(f"{node.op_type} '{node.name}': {wrong}")
        bias = _bias(view, node)
        if bias is not None and bias.dequantize is not None:
            lines.append(f"{node.op_type} '{node.name}': its bias is quantized; TensorRT wants it in float")
    return lines


def _wrong_type(view: GraphView, node: onnx.NodeProto) -> str:
    name = node.input[2] if len(node.input) > 2 else ""
    zero = view.constant(name)
    kind = view.element_type(name) if name else TensorProto.UINT8
    stored = view.element_type(node.input[0]) if node.op_type == "DequantizeLinear" else 0
    if TensorProto.INT8 not in (kind, stored) or stored not in (0, TensorProto.INT8):
        return f"quantized to {TensorProto.DataType.Name(stored or kind).lower()}; TensorRT takes int8 alone"
    if zero is not None and zero.any():
        return f"zero point {int(zero.ravel()[zero.ravel().nonzero()[0][0]])}; TensorRT takes 0 alone"
    return ""


def _bias(view: GraphView, node: onnx.NodeProto) -> Weight | None:
    takes_bias = node.op_type in ("Conv", "ConvTranspose", "Gemm") and len(node.input) > 2
    return view.weight(node.input[2]) if takes_bias else None
