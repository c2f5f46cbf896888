"""Finds the nodes of an optimized graph that multiply uint8 by int8, and says why some are not emulated.

DynamicQuantizeLSTM and QAttention saturate as matrix products do, along the input axis of their weights, but
they compute further steps around these products. So only their weights are judged. ConvInteger and MatMulNBits are
exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit.verify.graph_view import constant, operand
from qatkit.verify.int8_kernels import EMULATED, Int8Kernel, Judged, int8_kernel, of_bytes
from qatkit_verify.int8_operators import ONLY_JUDGED, PLACES
from qatkit_verify.pairs import overflowing_channels, product_rows


def judged(node: ir.Node, name: str, body: str = "") -> tuple[Judged | None, str]:
    """Judges a node by its weights, and returns the reason if it is not emulated.

    Args:
        node: a node of an optimized graph.
        name: the name for messages.
        body: the type of the operator whose body the graph is, if bodies of this type are not emulated.

    Returns:
        The judged operator, or None if it has no constant int8 weights that are multiplied by uint8, or if
        `int8_kernel` excludes it; and the reason why it is not emulated, "" if it is emulated or needs no
        emulation.
    """
    found = int8_kernel(node, name) or _by_weights(node, name)
    if found is None:
        return None, _computed(node)
    if not found.can_saturate or (isinstance(found, Int8Kernel) and not body):
        return found, ""
    return found, f"in the body of a {body}" if body else f"only the weights of a {node.op_type} are judged"


def _by_weights(node: ir.Node, name: str) -> Judged | None:
    if node.op_type not in ONLY_JUDGED or not of_bytes(node, ONLY_JUDGED[node.op_type].x_zero):
        return None
    weights = [constant(operand(node, place)) for place in ONLY_JUDGED[node.op_type].weights]
    known = [one for one in weights if one is not None and one.dtype == np.int8]
    if len(known) < len(weights):
        return None
    found = np.concatenate([_channels(one) for one in known])
    return Judged(name, len(found), int(found.sum()))


def _channels(weight: NDArray[Any]) -> NDArray[np.bool_]:
    rows = product_rows(weight)
    return overflowing_channels(rows.reshape(-1, rows.shape[-1]))


def _computed(node: ir.Node) -> str:
    """Returns why a node without a judged weight is not emulated; "" if it needs no emulation.

    A node needs none if its activations cannot be uint8, if its weights cannot be int8, or if it is a
    depthwise convolution.
    """
    places = PLACES.get(node.op_type)
    if places is None or not of_bytes(node, places.x_zero):
        return ""
    for place, zero in zip(places.weights, places.weight_zeros, strict=True):
        value = operand(node, place)
        weight = constant(value)
        kind = _type(value, operand(node, zero)) if weight is None else ir.DataType.from_numpy(weight.dtype)
        if kind is None or (kind == ir.DataType.INT8 and weight is None):
            return (
                "its int8 operand is computed" if kind else "its second operand is computed, and may be int8"
            )
        if kind == ir.DataType.INT8 and node.op_type in EMULATED and node.op_type != "QLinearConv":
            return "each matrix of its weight has its own zero points"
    return ""


def _type(value: ir.Value | None, zero: ir.Value | None) -> ir.DataType | None:
    """Returns the type of a computed operand from its zero point or producer; None if neither is known."""
    known = constant(zero)
    if known is not None:
        return ir.DataType.from_numpy(known.dtype)
    node = None if value is None else value.producer()
    if node is None:
        return None if value is None else value.dtype
    if node.op_type == "DynamicQuantizeLinear":
        return ir.DataType.UINT8
    if node.op_type == "QuantizeLinear":
        found = constant(operand(node, 2))
        return ir.DataType.UINT8 if found is None else ir.DataType.from_numpy(found.dtype)
    return value.dtype if value is not None else None
