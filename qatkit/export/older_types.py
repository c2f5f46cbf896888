"""Operators that took fewer types before: computed in a type that they took, which holds the same numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from qatkit.export.rewrite import Rule, new_constant

_SMALL = {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16}


def _through_int32(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Arithmetic on 8 and 16 bits → on 32, and cast back, which wraps around as the small type does."""
    kind = None if node.inputs[0] is None else node.inputs[0].dtype
    if kind not in _SMALL:
        return None
    wide = [builder.op("Cast", [value], {"to": ir.DataType.INT32}) for value in node.inputs]
    return builder.op("Cast", [builder.op(node.op_type, wide)], {"to": kind})


def _relu_of_integers(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Relu of integers → the larger of x and 0."""
    x = node.inputs[0]
    if x is None or x.dtype is None or not x.dtype.is_integer():
        return None
    return builder.op("Max", [x, new_constant(builder, node, "zero", np.array(0, x.dtype.numpy()))])


# Operator → its rule, behind the opset since which it takes the type.
TYPES: dict[str, list[tuple[int, Rule]]] = {
    **{kind: [(14, _through_int32)] for kind in ("Add", "Sub", "Mul", "Div")},
    "Relu": [(14, _relu_of_integers)],
}
