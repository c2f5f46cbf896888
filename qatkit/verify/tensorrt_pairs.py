"""Checks a QDQ file for TensorRT without running it.

TensorRT decides whether an operator runs in int8 when it builds its engine. Before that, one can only check
whether the file asks for int8 in the form that TensorRT accepts: symmetric int8 with zero point 0 everywhere,
weights stored in int8, float biases, and Q/DQ pairs on both operands of each Conv, Gemm or MatMul with a
weight.

Source: NVIDIA TensorRT developer guide, "Explicit Quantization"; ONNX-TensorRT's list of operators.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from qatkit.verify.graph_view import (
    Weight,
    constant,
    element_type,
    made_by,
    operand,
    quantized_type,
    weight,
    weight_of,
)

_PAIRS = ("QuantizeLinear", "DequantizeLinear")


def asks_for_int8(node: ir.Node) -> str:
    """Returns why a matrix operator of the file will run in float; "" if both operands are int8."""
    found = weight_of(node)
    if found is None:
        return "both operands are activations"
    if found.dequantize is None:
        return "its weight is float in the file (no DequantizeLinear)"
    data = next(value for value in node.inputs[:2] if weight(value) != found)
    return "" if made_by(data, "DequantizeLinear") is not None else "its input has no DequantizeLinear"


def broken_pairs(nodes: Iterable[ir.Node]) -> list[str]:
    """Returns one line for each Q or DQ node and each bias that TensorRT refuses to parse or to fuse."""
    lines = []
    for node in nodes:
        if node.op_type in _PAIRS and (wrong := _wrong_type(node)):
            lines.append(f"{node.op_type} '{node.name}': {wrong}")
        bias = _bias(node)
        if bias is not None and bias.dequantize is not None:
            lines.append(f"{node.op_type} '{node.name}': its bias is quantized; TensorRT needs it in float")
    return lines


def _wrong_type(node: ir.Node) -> str:
    int8, unknown = ir.DataType.INT8, ir.DataType.UNDEFINED
    kind, zero = quantized_type(node), constant(operand(node, 2))
    stored = element_type(node.inputs[0]) if node.op_type == "DequantizeLinear" else None
    if int8 not in (kind, stored) or stored not in (None, int8):
        return f"quantized to {(stored or kind or unknown).name.lower()}; TensorRT accepts only int8"
    if zero is not None and zero.any():
        return f"zero point {int(zero.ravel()[zero.ravel().nonzero()[0][0]])}; TensorRT accepts only 0"
    return ""


def _bias(node: ir.Node) -> Weight | None:
    takes_bias = node.op_type in ("Conv", "ConvTranspose", "Gemm")
    return weight(operand(node, 2)) if takes_bias else None
