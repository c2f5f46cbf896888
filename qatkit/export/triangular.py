"""Solves triangular systems with operators of opset 18: inverts the matrix, from small diagonal blocks to large ones.

    ⎡A  0⎤ -1   ⎡   A⁻¹       0 ⎤
    ⎣C  B⎦    = ⎣-B⁻¹C A⁻¹   B⁻¹⎦

Let X contain the inverses of all diagonal blocks of one size, and let C contain the off-diagonal block of each pair of
them. Then X - X C X contains the inverses of the diagonal blocks of twice the size. X starts with the reciprocals of
the diagonal, so n rows need log2 n steps of two matrix products. The number of rows must be known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
import onnxscript

op: Any = onnxscript.opset18  # its own type hints do not allow Python numbers
_BOOL = 9  # the number of the type in onnx.TensorProto


def _mask(places: Any) -> Any:
    return op.Cast(op.Constant(value=onnx_ir.tensor(places.astype(np.int32))), to=_BOOL)


def solve_triangular(a, b, upper: bool, left: bool = True, unitriangular: bool = False):  # type: ignore[no-untyped-def]
    """Returns the solution x of a·x = b, or of x·a = b if `left` is False; a is lower or upper triangular."""
    size = a.shape[-1]
    if not isinstance(size, int):
        raise NotImplementedError(f"a triangular system needs a known number of rows, not {size}")
    row, column = np.indices((size, size))
    diagonal, zero = _mask(row == column), op.CastLike(0.0, a)
    # Where instead of Mul, because the other half of the matrix may contain infinities or NaN.
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
