"""Checks a QDQ file, without running it, for an NPU whose scales are powers of two (`backend=npu_cnn`).

An operator with a weight runs in int8 if both operands come from a DequantizeLinear. If all scales around a
convolution are powers of two, its requantization is a shift, and the hardware supports only some shifts.
Other scales are not checked.

Source: the constraints listed in AMD Quark's refinement for NPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import onnx_ir as ir

from qatkit.quant.backends import NPU_CNN
from qatkit.verify.graph_view import constant, made_by, operand, weight, weight_of, weighted_ops
from qatkit.verify.tensorrt_pairs import asks_for_int8

__all__ = ["asks_for_int8", "broken_pairs"]

_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu", "PRelu", "Gelu")


def broken_pairs(nodes: Iterable[ir.Node]) -> list[str]:
    """Returns one line for each operator with a weight if the hardware does not support its shift."""
    lines = []
    assert NPU_CNN.shifts is not None
    low, high = NPU_CNN.shifts.cut
    for node in nodes:
        cut = shift_cut(node)
        if cut is not None and not low <= cut <= high:
            lines.append(
                f"{node.op_type} '{node.name}': its shift is {cut}; the hardware supports {low} to {high}"
            )
    return lines


def shift_cut(node: ir.Node) -> int | None:
    """Returns pos(weight) + pos(input) - pos(output) of an operator with a weight, with scales of 2^-pos.

    It is None if one of the three tensors is not quantized, has 16-bit integers (whose bounds are not known),
    or has several scales or one that is not a power of two.
    """
    found = weight_of(node) if node.op_type in weighted_ops() else None
    if found is None or found.dequantize is None:
        return None
    data = next(value for value in node.inputs[:2] if weight(value) != found)
    after = _quantize_after(node)
    source = made_by(data, "DequantizeLinear")
    positions = [_position(one) for one in (found.dequantize, source, after)]
    of_weight, of_input, of_output = positions
    if of_weight is None or of_input is None or of_output is None:
        return None
    return of_weight + of_input - of_output


def _quantize_after(node: ir.Node) -> ir.Node | None:
    users = list(node.outputs[0].uses())
    if len(users) != 1:
        return None
    reader = users[0].node
    if reader.op_type in _ACTIVATIONS:
        return _quantize_after(reader)
    return reader if reader.op_type == "QuantizeLinear" else None


def _position(pair: ir.Node | None) -> int | None:
    scale, zero = (None if pair is None else constant(operand(pair, place)) for place in (1, 2))
    if scale is None or scale.size != 1 or (zero is not None and zero.dtype.itemsize > 1):
        return None
    mantissa, exponent = math.frexp(float(scale.ravel()[0]))
    return 1 - exponent if mantissa == 0.5 else None
