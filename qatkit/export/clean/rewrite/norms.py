"""Joins the operators that exporters write for LayerNorm, InstanceNorm and L2 norm into one operator each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit.export.clean.rewrite.place import axes_of, held, is_number, put, rank, size
from qatkit.export.matching import made, number, pairs
from qatkit.verify.graph_view import constant, operand

# Largest lower bound of the divisor. The joined operators divide a shorter vector by it, LpNormalization by the length.
_TINY = 1e-6


class Normalized(NamedTuple):
    """The input tensor of a normalization, the axes of mean and variance, and the epsilon added to the variance."""

    x: ir.Value
    axes: tuple[int, ...]
    epsilon: float


def layer_norm(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes (x - mean) / sqrt(variance + epsilon) over the last axes as LayerNormalization, if their sizes are known.

    A constant scale and a constant bias that follow are included.

    A normalization over all axes after the channels, with a scale for each channel, is left to `instance_norm`.
    """
    found = _normalized(node)
    if found is None or (ranks := rank(found.x)) is None:
        return False
    if found.axes != tuple(range(ranks - len(found.axes), ranks)):
        return False
    sizes = tuple(size(found.x, axis) for axis in found.axes)
    if None in sizes:
        return False
    last, scale, bias = _affine(node, tuple(one or 0 for one in sizes))
    if scale is None and _scaled_by_channel(found, node, ranks):
        return False
    scale = np.ones([one or 0 for one in sizes], np.float32) if scale is None else scale
    inputs = [found.x, held(model, last, "scale", scale)]
    if bias is not None:
        inputs.append(held(model, last, "bias", bias))
    put(last, "LayerNormalization", inputs, {"axis": -len(sizes), "epsilon": found.epsilon})
    return True


def instance_norm(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes (x - mean) / sqrt(variance + epsilon) over all axes after the channels as InstanceNormalization.

    A constant scale and a constant bias that follow are included. x·a + (bias - mean·a) with
    a = scale / sqrt(variance + epsilon) is written in the same way.
    """
    found, scale, bias, last = _normalized(node), None, None, node
    if found is None:
        summed = _scaled_and_shifted(node)
        if summed is None:
            return False
        found, scale, bias = summed
    ranks, channels = rank(found.x), size(found.x, 1) if (rank(found.x) or 0) > 2 else None
    if ranks is None or channels is None or found.axes != tuple(range(2, ranks)):
        return False
    shape = (channels, *[1] * (ranks - 2))
    if scale is None:
        last, scale, bias = _affine(node, shape)
    elif (scale := _as(scale, shape)) is None or bias is None or (bias := _as(bias, shape)) is None:
        return False
    vectors = [np.ones(shape) if scale is None else scale, np.zeros(shape) if bias is None else bias]
    inputs = [
        held(model, last, what, one.reshape(-1).astype(np.float32))
        for what, one in zip(("scale", "bias"), vectors, strict=True)
    ]
    put(last, "InstanceNormalization", [found.x, *inputs], {"epsilon": found.epsilon})
    return True


def l2_norm(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes x / sqrt(sum of squares) over one axis as LpNormalization.

    The divisor may have a lower bound of up to 1e-6. LpNormalization has no such bound, so a vector shorter than the
    bound is divided by its own length.
    """
    if node.op_type == "Div":
        sides = ((operand(node, 0), operand(node, 1)),)
    elif node.op_type == "Mul":
        sides = tuple((x, _reciprocal(by)) for x, by in pairs(node))  # type: ignore[assignment]
    else:
        return False
    for x, by in sides:
        axes = None if x is None or by is None else _length(_unexpanded(by, x), x)
        if x is not None and axes is not None and len(axes) == 1:
            put(node, "LpNormalization", [x], {"axis": axes[0], "p": 2})
            return True
    return False


def _kept(node: ir.Node | None) -> bool:
    """Returns whether a reduction keeps the axes that it reduces, with size 1."""
    return node is not None and node.attributes.get_int("keepdims", 1) == 1


def _mean(value: ir.Value | None) -> tuple[ir.Value, tuple[int, ...]] | None:
    """Returns the tensor x and the axes if the value is mean(x)."""
    pool = made(value, "GlobalAveragePool")
    node = pool or made(value, "ReduceMean")
    x = None if node is None else operand(node, 0)
    if node is None or x is None or not _kept(node):
        return None
    ranks = rank(x)
    axes = axes_of(node) if pool is None else tuple(range(2, ranks)) if ranks else None
    return None if axes is None else (x, axes)


def _centred(value: ir.Value | None) -> tuple[ir.Value, tuple[int, ...]] | None:
    """Returns x and the axes of the mean if the value is x - mean(x)."""
    node = made(value, "Sub")
    found = None if node is None else _mean(operand(node, 1))
    return found if node is not None and found is not None and operand(node, 0) is found[0] else None


def _squared(value: ir.Value | None) -> ir.Value | None:
    """Returns x if the value is x²."""
    node = made(value, "Pow")
    if node is not None:
        return operand(node, 0) if is_number(operand(node, 1), 2.0) else None
    node = made(value, "Mul")
    return operand(node, 0) if node is not None and operand(node, 0) is operand(node, 1) else None


def _reciprocal(value: ir.Value | None) -> ir.Value | None:
    """Returns x if the value is 1 / x."""
    node = made(value, "Reciprocal")
    if node is not None:
        return operand(node, 0)
    node = made(value, "Div")
    return operand(node, 1) if node is not None and is_number(operand(node, 0), 1.0) else None


def _deviation(value: ir.Value | None) -> tuple[ir.Value, tuple[int, ...], float] | None:
    """Returns d, the axes of the mean and epsilon if the value is sqrt(mean(d²) + epsilon)."""
    root = made(value, "Sqrt")
    added = None if root is None else made(operand(root, 0), "Add")
    if added is None:
        return None
    for variance, constant_side in pairs(added):
        epsilon, mean = number(constant_side), _mean(variance)
        centred = None if mean is None else _squared(mean[0])
        if epsilon is not None and mean is not None and centred is not None:
            return centred, mean[1], epsilon
    return None


def _normalized(node: ir.Node) -> Normalized | None:
    """Returns the normalization that a Div, or a Mul with a reciprocal, computes."""
    if node.op_type == "Div":
        sides = ((operand(node, 0), operand(node, 1)),)
    elif node.op_type == "Mul":
        sides = tuple((x, _reciprocal(by)) for x, by in pairs(node))  # type: ignore[assignment]
    else:
        return None
    for above, below in sides:
        found, centred = _deviation(below), _centred(above)
        if found is not None and centred is not None and _same(found[0], above) and found[1] == centred[1]:
            return Normalized(centred[0], centred[1], found[2])
    return None


def _same(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Returns whether two values are the same tensor, or both are the same x - mean(x)."""
    if a is b:
        return True
    one, other = _centred(a), _centred(b)
    return one is not None and other is not None and one[0] is other[0] and one[1] == other[1]


def _scaled_and_shifted(
    node: ir.Node,
) -> tuple[Normalized, NDArray[np.floating], NDArray[np.floating]] | None:
    """Returns the normalization that x·a + (bias - mean·a) computes, with its scale and bias."""
    if node.op_type != "Add":
        return None
    for left, right in pairs(node):
        product, rest = made(left, "Mul"), made(right, "Sub")
        bias, shift = (
            (None, None) if rest is None else (constant(operand(rest, 0)), made(operand(rest, 1), "Mul"))
        )
        if product is None or bias is None or shift is None:
            continue
        for x, factor in pairs(product):
            inner = made(factor, "Mul")
            mean = next((_mean(one) for one, other in pairs(shift) if other is factor), None)
            if x is None or inner is None or mean is None or mean[0] is not x:
                continue
            for by, scale in pairs(inner):
                found, known = _deviation(_reciprocal(by)), constant(scale)
                centred = None if found is None else _centred(found[0])
                if found and known is not None and centred == mean and found[1] == mean[1]:
                    return Normalized(x, mean[1], found[2]), known, bias
    return None


def _affine(
    node: ir.Node, shape: tuple[int, ...]
) -> tuple[ir.Node, NDArray[np.floating] | None, NDArray[np.floating] | None]:
    """Finds a multiplication and an addition of constants after a node; returns the last node and both constants.

    A constant is None if there is no such operator, or if the constant cannot be broadcast to `shape`.
    """
    last, found = node, []
    for operator in ("Mul", "Add"):
        reader = _only_reader(last)
        beside = None
        if reader is not None and reader.op_type == operator and not reader.domain:
            beside = next((constant(b) for a, b in pairs(reader) if a is last.outputs[0]), None)
        vector = None if beside is None else _as(beside, shape)
        if reader is not None and vector is not None:
            last = reader
        found.append(vector)
    return last, found[0], found[1]


def _scaled_by_channel(found: Normalized, node: ir.Node, ranks: int) -> bool:
    """Returns whether a normalization is over all axes after the channels, with a constant factor per channel."""
    channels = size(found.x, 1) if found.axes == tuple(range(2, ranks)) else None
    return channels is not None and _affine(node, (channels, *[1] * (ranks - 2)))[1] is not None


def _only_reader(node: ir.Node) -> ir.Node | None:
    result = node.outputs[0]
    if len(result.uses()) != 1 or result.is_graph_output():
        return None
    reader = next(iter(result.consumers()))
    return reader if reader.graph is node.graph else None


def _as(vector: NDArray[np.floating], shape: tuple[int, ...]) -> NDArray[np.floating] | None:
    """Returns a float32 constant broadcast to a shape; None if it has another type or cannot be broadcast to it."""
    extra = max(0, vector.ndim - len(shape))
    if vector.dtype != np.float32 or any(one != 1 for one in vector.shape[:extra]):
        return None
    try:
        return np.ascontiguousarray(np.broadcast_to(vector.reshape(vector.shape[extra:]), shape))
    except ValueError:
        return None


def _unexpanded(value: ir.Value | None, like: ir.Value) -> ir.Value | None:
    """Returns the input of an Expand to the shape of `like`; any other value itself."""
    node = made(value, "Expand")
    if node is None:
        return value
    shape = made(operand(node, 1), "Shape")
    same = shape is not None and operand(shape, 0) is like
    known = constant(operand(node, 1))
    if known is not None and like.shape is not None:
        same = list(known) == list(like.shape)
    return operand(node, 0) if same else value


def _length(value: ir.Value | None, x: ir.Value) -> tuple[int, ...] | None:
    """Returns the axes of the norm if a value is the L2 norm of x, possibly with a lower bound of at most 1e-6."""
    bounded = _above(value, _TINY)
    norm = made(bounded, "ReduceL2")
    if norm is not None:
        return axes_of(norm) if operand(norm, 0) is x and _kept(norm) else None
    root = made(bounded, "Sqrt")
    if root is None:
        return None
    total = made(_above(operand(root, 0), _TINY**2), "ReduceSum")
    if total is not None:
        squares = _squared(operand(total, 0))
    else:
        total = made(_above(operand(root, 0), _TINY**2), "ReduceSumSquare")
        squares = None if total is None else operand(total, 0)
    return axes_of(total) if total is not None and squares is x and _kept(total) else None


def _above(value: ir.Value | None, most: float) -> ir.Value | None:
    """Returns the input of a Max or Clip with a lower bound from 0 to `most`; any other value itself."""
    for operator in ("Max", "Clip"):
        node = made(value, operator)
        if node is None or (operator == "Clip" and operand(node, 2) is not None) or len(node.inputs) < 2:
            continue
        for x, low in pairs(node) if operator == "Max" and len(node.inputs) == 2 else pairs(node)[:1]:
            bound = number(low)
            if bound is not None and 0 <= bound <= most * 1.01:
                return x
    return value
