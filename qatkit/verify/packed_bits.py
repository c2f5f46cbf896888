"""Counts the bits that a file spends per weight of packed products, with scales and zero points."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qatkit.verify.graph_view import stored

_NARROW = (ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT2, ir.DataType.UINT2)


def packed_bits(graph: ir.Graph) -> float | None:
    """Returns the mean number of bits per packed weight; None for a file without packed products.

    Packed weights are those of MatMulNBits nodes, and of DequantizeLinear nodes with blocks or with integers of
    fewer than 8 bits. A constant or a weight that several nodes read counts once.
    """
    weights, constants = dict[int, int](), dict[int, int]()
    for node in graph:
        count = _weights(node)
        if count is None:
            continue
        first = int(node.op_type == "MatMulNBits")
        weights[id(node.inputs[first])] = count
        constants.update(tensor for value in node.inputs[first : first + 3] for tensor in _held(value))
    return 8 * sum(constants.values()) / sum(weights.values()) if weights else None


def _weights(node: ir.Node) -> int | None:
    """Returns the number of packed weights of a node; None if it has none."""
    if node.op_type == "MatMulNBits":
        return node.attributes["K"].as_int() * node.attributes["N"].as_int()
    tensor = stored(node.inputs[0]) if node.op_type == "DequantizeLinear" else None
    if tensor is None or not (tensor.dtype in _NARROW or "block_size" in node.attributes):
        return None
    return int(np.prod(tensor.shape.numpy()))


def _held(value: ir.Value | None) -> list[tuple[int, int]]:
    """Returns (identity, bytes) of each constant that a value is or is computed from."""
    tensor = stored(value)
    if tensor is not None:
        return [(id(value), tensor.nbytes)]
    node = value.producer() if value is not None else None
    return [] if node is None else [found for source in node.inputs for found in _held(source)]
