"""MatMulNBits in NumPy for onnx's reference evaluator.

It follows the definition in onnxruntime's docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx_models import Array


def integers(held: Array, bits: int, count: int) -> Array:
    """Unpacks the first `count` integers of each row of bytes, lowest bits first."""
    found = np.stack([(held >> place) & (2**bits - 1) for place in range(0, 8, bits)], -1)
    return found.reshape(*held.shape[:-1], -1)[..., :count].astype(np.float64)


def dequantized(held: Array, scale: Array, zero: Array | None, bits: int, inputs: int) -> Array:
    """Unpacks a weight [out, in] from bytes [out, blocks, bytes], scales [out, blocks] and zero points.

    zero: None for zero points of 2^(bits - 1).
    """
    rows, blocks, size = held.shape
    offset = np.full((rows, blocks), 2.0 ** (bits - 1))
    if zero is not None:
        offset = integers(zero.reshape(rows, -1), bits, blocks)
    values = (integers(held, bits, size * 8 // bits) - offset[..., None]) * scale.reshape(rows, blocks, 1)
    found: Array = values.reshape(rows, -1)[:, :inputs]
    return found


class MatMulNBits(OpRun):
    """The operator MatMulNBits, computed in float64."""

    op_domain = "com.microsoft"

    def _run(self, *given: Array | None, **settings: Any) -> tuple[Array]:
        a, held, scale = given[:3]
        zero, groups, bias = (given[place] if place < len(given) else None for place in (3, 4, 5))
        assert a is not None and held is not None and scale is not None and groups is None
        sizes: Any = self
        weight = dequantized(held, scale, zero, sizes.bits, sizes.K)
        assert weight.shape == (sizes.N, sizes.K) and held.shape[2] * 8 == sizes.block_size * sizes.bits
        return ((a.astype(np.float64) @ weight.T + (0 if bias is None else bias)).astype(np.float32),)


def by_reference(path: Path, feeds: Mapping[str, Array]) -> list[Array]:
    """Returns a file's outputs in onnx's reference evaluator."""
    found: Any = ReferenceEvaluator(str(path), new_ops=[MatMulNBits]).run(None, dict(feeds))
    return list(found)
