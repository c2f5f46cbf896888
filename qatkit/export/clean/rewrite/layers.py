"""Rewrites BatchNorms as convolutions, and writes GELU and ReLU as one operator each."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit.export.clean.rewrite.place import held, put, rank
from qatkit.export.matching import by_number, factors, gelu_input, is_open, made, number, pairs
from qatkit.verify.graph_view import constant, operand

_CONVOLUTIONS = ("Conv", "ConvTranspose")


def batch_norm_to_conv(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes a BatchNormalization with spatial axes as a depthwise convolution with kernel size 1."""
    found, ranks = _affine(node), rank(operand(node, 0))
    if found is None or ranks is None or ranks < 3:
        return False
    factor, shift = found
    weight = factor.reshape(-1, 1, *[1] * (ranks - 2))
    inputs = [operand(node, 0), held(model, node, "weight", weight), held(model, node, "bias", shift)]
    put(node, "Conv", inputs, {"group": len(factor), "kernel_shape": [1] * (ranks - 2)})
    return True


def batch_norm_of_concat(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Folds a BatchNormalization into the convolutions before it, whose channels a Concat joins.

    The weights must be constant, and nothing else may read the outputs of the convolutions and of the Concat.
    """
    found = _affine(node)
    joined = operand(node, 0)
    concat = None if joined is None else joined.producer()
    if found is None or concat is None or concat.op_type != "Concat" or not _lone(joined, graph):
        return False
    convs = [None if value is None else value.producer() for value in concat.inputs]
    if concat.attributes.get_int("axis", 0) != 1 or not all(
        conv is not None and conv.op_type in _CONVOLUTIONS and not conv.domain and _lone(conv.outputs[0], graph)
        and constant(operand(conv, 1)) is not None
        and (operand(conv, 2) is None or constant(operand(conv, 2)) is not None)
        for conv in convs
    ):  # fmt: skip
        return False
    first = 0
    for conv in convs:
        assert conv is not None
        first += _multiply(model, conv, found[0][first:], found[1][first:])
    result, name = node.outputs[0], node.outputs[0].name
    assert joined is not None
    joined.shape, joined.type = result.shape or joined.shape, result.type
    ir.convenience.replace_all_uses_with(result, joined, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    joined.name = name
    return True


def gelu(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Joins 0.5 · x · (1 + erf(x / √2)), or its approximation by tanh, into a Gelu."""
    x, form = gelu_input(node), "none"
    if x is None:
        x, form = _tanh_gelu(node), "tanh"
    if x is None:
        return False
    put(node, "Gelu", [x], {"approximate": form})
    return True


def relu(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes a Clip from 0 without an upper bound, and a Max with 0, as Relu."""
    if node.op_type == "Clip" and is_open(node, "max"):
        low = (
            number(operand(node, 1)) if len(node.inputs) > 1 else node.attributes.get_float("min", -math.inf)
        )
        x = operand(node, 0) if low == 0 else None
    elif node.op_type == "Max" and len(node.inputs) == 2:
        x = next((one for one, other in pairs(node) if _zero(other)), None)
    else:
        return False
    if x is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return False
    put(node, "Relu", [x])
    return True


def _zero(value: ir.Value | None) -> bool:
    held_value = constant(value)
    return held_value is not None and held_value.ndim == 0 and held_value == 0


def _affine(node: ir.Node) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Returns the factor and shift of each channel of a BatchNormalization in inference mode.

    Returns None for other nodes, and if a parameter is not a float32 constant.
    """
    if node.op_type != "BatchNormalization" or node.attributes.get_int("training_mode", 0) > 0:
        return None
    held_values = [constant(operand(node, index)) for index in range(1, 5)]
    if len(node.outputs) > 1 or any(one is None or one.dtype != np.float32 for one in held_values):
        return None
    scale, bias, mean, variance = (np.asarray(one, np.float64) for one in held_values)
    factor = scale / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
    return factor.astype(np.float32), (bias - mean * factor).astype(np.float32)


def _lone(value: ir.Value | None, graph: ir.Graph) -> bool:
    return (
        value is not None
        and len(value.uses()) == 1
        and not value.is_graph_output()
        and all(node.graph is graph for node in value.consumers())
    )


def _multiply(model: ir.Model, conv: ir.Node, factor: NDArray[np.float32], shift: NDArray[np.float32]) -> int:
    """Folds the first factors and shifts into a convolution, one per output channel; returns their number."""
    weight, bias = constant(operand(conv, 1)), constant(operand(conv, 2))
    assert weight is not None
    groups = conv.attributes.get_int("group", 1)
    transposed = conv.op_type == "ConvTranspose"
    count = int(weight.shape[1] * groups if transposed else weight.shape[0])
    factor, shift = factor[:count], shift[:count]
    if transposed:  # [inputs, outputs of a group, ...]; the inputs of a group are consecutive
        parts = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        scaled = parts * factor.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
    else:
        scaled = weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    total = shift if bias is None else shift + bias * factor
    conv.resize_inputs(3)
    conv.replace_input_with(1, held(model, conv, "weight", scaled.reshape(weight.shape).astype(np.float32)))
    conv.replace_input_with(2, held(model, conv, "bias", total.astype(np.float32)))
    return count


def _tanh_gelu(node: ir.Node) -> ir.Value | None:
    """Returns x if the node computes 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))."""
    if node.op_type != "Mul":
        return None
    rest = [one for one in factors(node, 3) if number(one) is None]
    if len(rest) != 2 or not any(number(one) == 0.5 for one in factors(node, 3)):
        return None
    for x, gate in (rest, rest[::-1]):
        tanh = made(by_number(made(gate, "Add"), "Add", 1.0), "Tanh")
        inner = (
            None if tanh is None else by_number(made(operand(tanh, 0), "Mul"), "Mul", math.sqrt(2 / math.pi))
        )
        total = made(inner, "Add")
        if total is None:
            continue
        for one, other in pairs(total):
            cube = made(by_number(made(other, "Mul"), "Mul", 0.044715), "Pow")
            if one is x and cube is not None and operand(cube, 0) is x and number(operand(cube, 1)) == 3.0:
                return x
    return None
