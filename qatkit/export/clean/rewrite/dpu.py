"""Approximates operators as accelerators compute them. This changes the function, so it is done only on request.

The constants are those of AMD's DPU as AMD Quark 0.13 simulates it: factors k / 2^n, since the hardware multiplies by
an integer and shifts. With fixed-point values, a quantized file then gives the same results as the hardware.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from qatkit.export.clean.graphs import taken_names
from qatkit.export.clean.rewrite.place import axes_of, before, held, put, rank, size, take_over
from qatkit.export.hidden_names import free_name
from qatkit.export.matching import clip_bounds, is_open
from qatkit.verify.graph_view import operand

_SIXTH = (2731, 14)  # k / 2^n in place of 1/6
# k / 2^n in place of 1 / (side · side), for square pools; other pools get the best fraction with few bits.
_POOLS = {3: (7, 6), 5: (10, 8), 6: (7, 8), 7: (21, 10), 14: (21, 12)}
_LARGEST_POOL = 255
_BITS_OF_SLOPE = 8
_LOWEST, _HIGHEST = -128, 127  # the bounds of a Clip become 8-bit integers
_ENDS = ("min", "max")
# exp(r) = 1 + r + 0.486328125 r² + 0.21875 r³ for 0 <= r < ln 2
_CUBIC = (0.21875, 0.486328125, 1.0, 1.0)


def relu6(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes a Clip from 0 to any upper bound as Relu, which has no upper bound."""
    if node.op_type != "Clip" or clip_bounds(node)[0] != 0 or is_open(node, "max"):
        return False
    put(node, "Relu", [operand(node, 0)])
    return True


def leaky_relu(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Rounds the slope of a LeakyRelu to 8 bits after the binary point: 0.1 becomes 26/256."""
    if node.op_type != "LeakyRelu":
        return False
    slope = node.attributes.get_float("alpha", 0.01)
    node.attributes.add(ir.AttrFloat32("alpha", round(slope * 2**_BITS_OF_SLOPE) / 2**_BITS_OF_SLOPE))
    return True


def sigmoid(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes a Sigmoid as the HardSigmoid max(0, min(1, x/6 + 1/2))."""
    if node.op_type != "Sigmoid":
        return False
    put(node, "HardSigmoid", [operand(node, 0)], {"alpha": 1 / 6, "beta": 0.5})
    return True


def hard_sigmoid(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Multiplies a HardSigmoid max(0, min(1, x/6 + 1/2)) by 6 · 2731/16384, as the hardware approximates 1/6."""
    slope, shift = (node.attributes.get_float(*one) for one in (("alpha", 0.2), ("beta", 0.5)))
    if node.op_type != "HardSigmoid" or not math.isclose(slope, 1 / 6, rel_tol=1e-4) or shift != 0.5:
        return False
    return _scale(model, node, _SIXTH[0] / 2 ** _SIXTH[1] * 6)


def average_pool(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Multiplies the mean of a square pool by s · side², where s is the hardware's approximation of 1 / side²."""
    x = operand(node, 0)
    if node.op_type == "GlobalAveragePool" and rank(x) == 4:
        sides = [size(x, 2), size(x, 3)]
    elif node.op_type == "AveragePool":
        sides = [*node.attributes["kernel_shape"].as_ints()]
    else:
        return False
    side = sides[0]
    if len(sides) != 2 or side is None or side != sides[1] or side > _LARGEST_POOL:
        return False
    k, shift = _POOLS.get(side) or best_fraction(side * side)
    return _scale(model, node, k / 2**shift * side * side)


def reduce_mean(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Multiplies a mean of n values by s · n, where s is the hardware's approximation of 1 / n."""
    axes = axes_of(node) if node.op_type == "ReduceMean" else None
    sizes = [size(operand(node, 0), axis) for axis in axes or ()]
    if not sizes or any(one is None for one in sizes):
        return False
    count = math.prod(one or 0 for one in sizes)
    k, shift = best_fraction(count)
    return _scale(model, node, k / 2**shift * count)


def clip(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Rounds the bounds of a Clip to integers from -128 to 127; a missing bound becomes -128 or 127."""
    x = operand(node, 0)
    known = all(
        bound is not None or is_open(node, end) for bound, end in zip(clip_bounds(node), _ENDS, strict=True)
    )
    if node.op_type != "Clip" or x is None or x.dtype != ir.DataType.FLOAT or not known:
        return False
    low, high = (
        default if bound is None else round(max(_LOWEST, min(_HIGHEST, bound)))
        for bound, default in zip(clip_bounds(node), (_LOWEST, _HIGHEST), strict=True)
    )
    bounds = [
        held(model, node, end, np.asarray(one, np.float32))
        for end, one in zip(_ENDS, (low, high), strict=True)
    ]
    put(node, "Clip", [x, *bounds])
    return True


def softmax(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes a Softmax as the hardware computes it in bfloat16.

    exp(x) becomes 2^n · c(x - n ln 2), where n is x / ln 2 rounded down and c is a cubic polynomial.
    """
    x = operand(node, 0)
    if node.op_type != "Softmax" or x is None or x.dtype != ir.DataType.FLOAT:
        return False

    def number(what: str, value: float) -> ir.Value:
        return held(model, node, what, np.asarray(value, np.float32))

    def step(operator: str, *inputs: ir.Value, rounded: bool = True, **attributes: int) -> ir.Value:
        found = before(model, node, operator, inputs, attributes)
        return _in_bfloat16(model, node, found) if rounded else found

    x = _in_bfloat16(model, node, x)
    ln2 = number("ln2", 0.69140625)  # in bfloat16
    whole = step("Floor", step("Mul", x, number("per_ln2", 1.4453125)), rounded=False)
    rest = step("Sub", x, step("Mul", whole, ln2))
    result = number("cubic3", _CUBIC[0])
    for place, coefficient in enumerate(_CUBIC[1:]):
        product = step("Mul", result, rest, rounded=False)
        result = step("Add", product, number(f"cubic{2 - place}", coefficient))
    power = step("Mul", step("Pow", number("two", 2.0), whole), result)
    axis = held(model, node, "axis", np.asarray([node.attributes.get_int("axis", -1)], np.int64))
    total = step("ReduceSum", power, axis, keepdims=1)
    quotient = step("Div", power, total, rounded=False)
    wide = _in_bfloat16(model, node, quotient)
    put(node, "Identity", [wide])
    return True


def best_fraction(count: int) -> tuple[int, int]:
    """Returns k and n of the fraction k / 2^n that is nearest to 1 / count, with n at most 6 + ⌈log2(count)⌉."""
    shifts = range(7 + math.ceil(math.log2(count)))
    shift = min(shifts, key=lambda one: abs(round(2**one / count) / 2**one - 1 / count))
    return round(2**shift / count), shift


def _scale(model: ir.Model, node: ir.Node, factor: float) -> bool:
    """Multiplies the result of a node by a number."""
    old = node.outputs[0]
    name, scale = old.name, held(model, node, "factor", np.asarray(factor, np.float32))
    product = ir.node("Mul", [None, scale], name=f"{node.name or name}/Mul")
    take_over(old, product)
    product.replace_input_with(0, old)
    old.name = free_name(f"{name}_unscaled", taken_names(model))
    return True


def _in_bfloat16(model: ir.Model, node: ir.Node, value: ir.Value) -> ir.Value:
    """Returns a float32 value rounded to bfloat16."""
    narrow = before(model, node, "Cast", [value], {"to": ir.DataType.BFLOAT16.value})
    narrow.type = ir.TensorType(ir.DataType.BFLOAT16)
    wide = before(model, node, "Cast", [narrow], {"to": ir.DataType.FLOAT.value})
    wide.type = ir.TensorType(ir.DataType.FLOAT)
    return wide
