"""Rewrites means as pools, pools over large areas as two pools, and splits as slices."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from qatkit.export.clean.rewrite.place import axes_of, before, held, put, rank, size, take_over
from qatkit.verify.graph_view import constant, operand

LARGEST = 512  # largest number of values that the pools of accelerators average


def mean_to_pool(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes a mean over all axes after the channels as GlobalAveragePool."""
    x = operand(node, 0)
    ranks = rank(x)
    if node.op_type != "ReduceMean" or ranks is None or ranks < 3 or axes_of(node) != tuple(range(2, ranks)):
        return False
    if node.attributes.get_int("keepdims", 1):
        put(node, "GlobalAveragePool", [x])
    else:
        pooled = before(model, node, "GlobalAveragePool", [x])
        put(node, "Flatten", [pooled], {"axis": 1})
    return True


def split_pool(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Inserts an AveragePool before a GlobalAveragePool of more than 512 values, so that each averages at most 512.

    Nothing changes if the height and width have no suitable divisors.
    """
    x = operand(node, 0)
    if node.op_type != "GlobalAveragePool" or rank(x) != 4:
        return False
    height, width = size(x, 2), size(x, 3)
    if height is None or width is None or height * width <= LARGEST:
        return False
    first = [_factor(height), _factor(width)]
    if math.prod(first) > LARGEST or height * width // math.prod(first) > LARGEST:
        return False
    node.replace_input_with(
        0, before(model, node, "AveragePool", [x], {"kernel_shape": first, "strides": first})
    )
    return True


def _factor(number: int) -> int:
    """Returns the largest divisor of a number up to its square root."""
    return next(one for one in range(math.isqrt(number), 0, -1) if number % one == 0)


def split_to_slice(model: ir.Model, graph: ir.Graph, node: ir.Node) -> bool:
    """Writes a Split as a Slice for each part."""
    if node.op_type != "Split" or len(node.outputs) < 2 or (sizes := _sizes(node)) is None:
        return False
    axis = node.attributes.get_int("axis", 0)
    ends = np.cumsum([0, *sizes])
    for part, output in enumerate(list(node.outputs)):
        if not output.uses() and not output.is_graph_output():
            continue
        # The last part ends at the end of the axis, whose size need not be known.
        stop = np.iinfo(np.int64).max if part == len(sizes) - 1 else ends[part + 1]
        bounds = [
            held(model, node, f"{what}{part}", np.asarray([value], np.int64))
            for what, value in (("start", ends[part]), ("end", stop), ("axis", axis))
        ]
        slice_ = ir.node("Slice", [operand(node, 0), *bounds], name=f"{node.name}/Slice{part}")
        take_over(output, slice_)
    graph.remove(node, safe=True)
    return True


def _sizes(node: ir.Node) -> list[int] | None:
    """Returns the sizes of all parts of a Split; None if they are unknown."""
    known = constant(operand(node, 1))
    if known is None and "split" in node.attributes:
        known = np.asarray(node.attributes["split"].as_ints())
    if known is not None:
        return [int(one) for one in known]
    if operand(node, 1) is not None:
        return None
    total = size(operand(node, 0), node.attributes.get_int("axis", 0))
    if total is None:
        return None
    part = -(-total // len(node.outputs))
    return [min(part, total - part * i) for i in range(len(node.outputs))]
