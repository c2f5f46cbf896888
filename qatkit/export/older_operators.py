"""Replaces operators and types that an opset does not have yet by older ones.

Each rule is stored with the opset that introduced the operator (`lower_opset`). Where possible, ONNX Runtime fuses the
replacement again, or folds it when it loads the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir import tape

from qatkit.export.older_forms import Newer
from qatkit.export.rewrite import Rule, given, ints, length, new_constant, new_int64, new_scalar

_SMALL = {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16}


def _layer_norm(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Computes LayerNormalization as ((x - mean) / sqrt(mean((x - mean)²) + ε))·γ + β.

    ONNX Runtime fuses this form.
    """
    x, gamma = node.inputs[0], node.inputs[1]
    beta = given(node, 2)
    assert x is not None and x.shape is not None
    axis = node.attributes.get_int("axis", -1)
    axes: dict[str, Any] = {
        "axes": [a - len(x.shape) for a in range(axis % len(x.shape), len(x.shape))],
        "keepdims": 1,
    }
    epsilon = new_scalar(builder, node, "epsilon", node.attributes.get_float("epsilon", 1e-5), x)
    two = new_scalar(builder, node, "two", 2.0, x)
    centred = builder.op("Sub", [x, builder.op("ReduceMean", [x], axes)])
    variance = builder.op("ReduceMean", [builder.op("Pow", [centred, two])], axes)
    deviation = builder.op("Sqrt", [builder.op("Add", [variance, epsilon])])
    result = builder.op("Mul", [builder.op("Div", [centred, deviation]), gamma])
    if beta is None:  # ONNX Runtime's fusion requires a bias
        zeros = np.zeros([length(x, a) or 1 for a in axes["axes"]], np.float32)
        beta = new_constant(builder, node, "beta", zeros)
    return builder.op("Add", [result, beta])


def _group_norm(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Rewrites GroupNormalization as InstanceNormalization of [N, groups, rest], with scale and bias per group."""
    x, groups = node.inputs[0], node.attributes.get_int("num_groups", 1)
    epsilon = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    grouped = builder.op("Reshape", [x, new_int64(builder, node, "groups", 0, groups, -1)])
    result = builder.op("InstanceNormalization", [grouped, node.inputs[1], node.inputs[2]], epsilon)
    return builder.op("Reshape", [result, builder.op("Shape", [x])])


def _hard_swish(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Computes HardSwish as x · HardSigmoid(x) with alpha 1/6 and beta 1/2."""
    x = node.inputs[0]
    return builder.op("Mul", [x, builder.op("HardSigmoid", [x], {"alpha": 1 / 6, "beta": 0.5})])


def _mish(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Computes Mish as x · tanh(softplus(x))."""
    x = node.inputs[0]
    return builder.op("Mul", [x, builder.op("Tanh", [builder.op("Softplus", [x])])])


def _cast_like(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Rewrites CastLike as Cast to the type of the second input."""
    wanted = node.inputs[1].dtype  # type: ignore[union-attr]
    if wanted is None:
        raise Newer("casts to an unknown type")
    return builder.op("Cast", [node.inputs[0]], {"to": wanted})


def _triangle(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Computes Trilu: keeps x where column - row is at least k (lower triangle: at most k), and sets the rest to 0."""
    x, k = node.inputs[0], given(node, 1)
    rows, columns = (_positions(node, builder, axis) for axis in (-2, -1))
    limit = rows if k is None else builder.op("Add", [rows, k])
    upper = node.attributes.get_int("upper", 1)
    kept = builder.op("GreaterOrEqual" if upper else "LessOrEqual", [columns, limit])
    if x is not None and x.dtype == ir.DataType.BOOL:
        return builder.op("And", [x, kept])
    return builder.op("Where", [kept, x, new_scalar(builder, node, "zero", 0, x)])


def _positions(node: ir.Node, builder: tape.Tape, axis: int) -> ir.Value:
    """Returns 0, 1, 2, ... along the second to last axis as [n, 1], or along the last axis as [n]."""
    what, size = {-2: "rows", -1: "columns"}[axis], length(node.inputs[0], axis)
    if size is not None:
        numbers = np.arange(size, dtype=np.int64)
        return new_constant(builder, node, what, numbers[:, None] if axis == -2 else numbers)
    sizes = builder.op("Shape", [node.inputs[0]])
    limit = builder.op(
        "Gather", [sizes, new_constant(builder, node, f"{what}_axis", np.array(axis, np.int64))]
    )
    start, step = (new_constant(builder, node, f"{what}_{n}", np.array(n, np.int64)) for n in (0, 1))
    found = builder.op("Range", [start, limit, step])
    if axis == -2:
        found = builder.op("Unsqueeze", [found, new_int64(builder, node, "last_axis", 1)])
    return found


def _overlap_add(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Computes Col2Im: gathers, for every pixel, the elements of the columns that belong to the pixel, and adds them.

    A transposed convolution with an identity as weight would give the same result, but its weight would count as one
    that was left float.
    """
    columns = node.inputs[0]
    image, kernel, rows = ints(node.inputs[1]), ints(node.inputs[2]), length(columns, 1)
    if image is None or kernel is None or rows is None:
        raise Newer("folds to a size that is not constant")
    rank, channels = len(kernel), rows // int(np.prod(kernel))
    steps, spread = (node.attributes.get_ints(name, [1] * rank) for name in ("strides", "dilations"))
    pads = node.attributes.get_ints("pads", [0] * 2 * rank)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, spread, strict=True)]
    blocks = [(image[i] + pads[i] + pads[i + rank] - reach[i]) // steps[i] + 1 for i in range(rank)]
    cells = np.indices((*kernel, *blocks)).reshape(2 * rank, -1)
    places = [cells[rank + i] * steps[i] + cells[i] * spread[i] - pads[i] for i in range(rank)]
    table = _by_pixel(places, image)
    flat = builder.op("Reshape", [columns, new_int64(builder, node, "cells", -1, channels, cells.shape[1])])
    with_zero = builder.op("Pad", [flat, new_int64(builder, node, "zero", 0, 0, 0, 0, 0, 1)])
    found = builder.op("Gather", [with_zero, new_constant(builder, node, "table", table)], {"axis": 2})
    total = builder.op("ReduceSum", [found, new_int64(builder, node, "turns", 2)], {"keepdims": 0})
    return builder.op("Reshape", [total, new_int64(builder, node, "image", -1, channels, *image)])


def _by_pixel(places: list[NDArray[np.int64]], image: list[int]) -> NDArray[np.int64]:
    """Returns the indices of the column elements to add for each pixel, [most elements of a pixel, pixels].

    If a pixel has fewer elements, its other indices are the number of all elements, where the caller appends a zero.

    Args:
        places: the coordinates of the pixel of each element, one array per axis of the image.
        image: the size of the image along each axis.
    """
    inside = np.all([(p >= 0) & (p < size) for p, size in zip(places, image, strict=True)], axis=0)
    cells = np.flatnonzero(inside)
    pixels = np.ravel_multi_index([p[inside] for p in places], image)
    order = np.argsort(pixels, kind="stable")
    turns = np.arange(len(order)) - np.searchsorted(pixels[order], pixels[order])
    table = np.full((turns.max(initial=0) + 1, int(np.prod(image))), len(inside), np.int64)
    table[turns, pixels[order]] = cells[order]
    return table


def _complement(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Computes BitwiseNot as -1 - x; for an unsigned type, as the largest number of the type minus x."""
    x = node.inputs[0]
    assert x is not None
    known = None if x.dtype is None else np.dtype(x.dtype.numpy())
    if known is None or known.kind not in "iu" or known.itemsize < 4:
        raise Newer("inverts the bits of a type without subtraction in the older opset")
    ones = np.array(-1 if known.kind == "i" else np.iinfo(known).max, known)
    return builder.op("Sub", [new_constant(builder, node, "ones", ones), x])


def _through_int32(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Computes 8- and 16-bit arithmetic in 32 bits; the Cast back wraps around like the small type."""
    kind = None if node.inputs[0] is None else node.inputs[0].dtype
    if kind not in _SMALL:
        return None
    wide = [builder.op("Cast", [value], {"to": ir.DataType.INT32}) for value in node.inputs]
    return builder.op("Cast", [builder.op(node.op_type, wide)], {"to": kind})


def _relu_of_integers(node: ir.Node, builder: tape.Tape) -> ir.Value | None:
    """Computes Relu of integers as the maximum of x and 0."""
    x = node.inputs[0]
    if x is None or x.dtype is None or not x.dtype.is_integer():
        return None
    return builder.op("Max", [x, new_constant(builder, node, "zero", np.array(0, x.dtype.numpy()))])


# The rule for each operator, with the opset that introduced the operator or its types.
OPERATORS: dict[str, list[tuple[int, Rule]]] = {
    "LayerNormalization": [(17, _layer_norm)],
    "GroupNormalization": [(18, _group_norm)],
    "HardSwish": [(14, _hard_swish)],
    "Mish": [(18, _mish)],
    "CastLike": [(15, _cast_like)],
    "Trilu": [(14, _triangle)],
    "Col2Im": [(18, _overlap_add)],
    "BitwiseNot": [(18, _complement)],
    **{kind: [(14, _through_int32)] for kind in ("Add", "Sub", "Mul", "Div")},
    "Relu": [(14, _relu_of_integers)],
}
