"""Bits that a file spends on each weight of its packed products, scales and zero points included."""

from __future__ import annotations

import onnx_ir as ir

from qatkit.verify.graph_view import stored


def packed_bits(graph: ir.Graph) -> float | None:
    """Returns the bits per weight of all MatMulNBits nodes together; None where there is none.

    Constants that several nodes read count once, and so does a weight that they share.
    """
    weights, constants = dict[int, int](), dict[int, int]()
    for node in graph:
        if node.op_type != "MatMulNBits":
            continue
        packed = node.inputs[1]
        weights[id(packed)] = node.attributes["K"].as_int() * node.attributes["N"].as_int()
        constants.update(tensor for value in node.inputs[1:4] for tensor in _held(value))
    return 8 * sum(constants.values()) / sum(weights.values()) if weights else None


def _held(value: ir.Value | None) -> list[tuple[int, int]]:
    """The constants, by identity and bytes, that a value is or is computed from."""
    tensor = stored(value)
    if tensor is not None:
        return [(id(value), tensor.nbytes)]
    node = value.producer() if value is not None else None
    return [] if node is None else [found for source in node.inputs for found in _held(source)]
