"""Triangular systems in operators of opset 18: the inverse, from small diagonal blocks to large ones.

    ⎡A  0⎤ -1   ⎡   A⁻¹       0 ⎤
    ⎣C  B⎦    = ⎣-B⁻¹C A⁻¹   B⁻¹⎦

With X, the inverses of all diagonal blocks of one size, and C, what lies between the two of each pair, X - X C X has
those of twice the size. It starts with the reciprocals of the diagonal, so n rows take log2 n steps of two products.
The number of rows has to be known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
import onnxscript

op: Any = onnxscript.opset18  # its own types know nothing of Python's numbers
_BOOL = 9  # of onnx.TensorProto


def _mask(places: Any) -> Any:
    return op.Cast(op.Constant(value=onnx_ir.tensor(places.astype(np.int32))), to=_BOOL)


def solve_triangular(a, b, upper: bool, left: bool = True, unitriangular: bool = False):  # type: ignore[no-untyped-def]
    """Solves a·x = b, or x·a = b, for x."""
    size = a.shape[-1]
    if not isinstance(size, int):
        raise NotImplementedError(f"a triangular system of any size ({size})")
    row, column = np.indices((size, size))
    diagonal, zero = _mask(row == column), op.CastLike(0.0, a)
    # Where, not Mul: the other half may hold anything, an infinity too.
    inverse = op.CastLike(diagonal, a) if unitriangular else op.Where(diagonal, op.Reciprocal(a), zero)
    if upper:
        row, column = column, row
    step = 1
    while step < size:
        pair = row // (2 * step) == column // (2 * step)
        between = pair & (row // step % 2 == 1) & (column // step % 2 == 0)
        corner = op.Where(_mask(between), a, zero)
        inverse = op.Sub(inverse, op.MatMul(op.MatMul(inverse, corner), inverse))
        step *= 2
    return op.MatMul(inverse, b) if left else op.MatMul(b, inverse)
