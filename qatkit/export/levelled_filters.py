"""Makes ONNX Runtime's dynamic quantization, which has one scale for all filters of a Conv, work per channel.

`levelled` divides each filter by its range (its largest magnitude) before quantization. `scaled_back` multiplies the
scale in the file by this range afterwards. The file needs no additional node (figures: decision 15). A Conv that the
tool leaves float gets its original weight back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit.verify.graph_view import constant, element_type, operand, stored


@dataclass(frozen=True)
class Levelled:
    """A record of what `levelled` changed in one weight.

    Attributes:
        original: the weight before the change.
        ranges: the ranges of the filters, shaped to multiply the Conv's output.
    """

    original: ir.TensorProtocol
    ranges: NDArray[np.float32]


def levelled(model: ir.Model) -> dict[str, Levelled]:
    """Divides each filter of a Conv by its range, in place, and returns the changes by the weight's name.

    Depthwise weights, and weights that other operators or branches read, do not change.
    """
    found = {}
    for name, value in model.graph.initializers.items():
        users = value.consumers()
        # The tool quantizes nothing in branches.
        alike = (n.op_type == "Conv" and n.inputs[1] is value and n.graph is model.graph for n in users)
        if not users or not all(alike) or element_type(value) != ir.DataType.FLOAT or is_depthwise(users[0]):
            continue
        values, original = constant(value), value.const_value
        assert values is not None and original is not None, value
        rows = row_ranges(values, (0,))
        value.const_value = ir.tensor(values / rows, name=name)
        found[name] = Levelled(original, rows.reshape(1, *rows.shape[:-1]))
    return found


def scaled_back(model: ir.Model, changed: dict[str, Levelled]) -> None:
    """Multiplies the scale of each levelled weight by the ranges of its filters; the scale becomes [1, C, 1, 1].

    A weight that the tool left float is restored.
    """
    values = model.graph.initializers
    for name, one in changed.items():
        scale = values.get(f"{name}_scale")
        if f"{name}_quantized" in values and scale is not None:
            number = constant(scale)
            assert number is not None, scale
            rows = (number.reshape(()) * one.ranges).astype(np.float32)
            scale.const_value = ir.tensor(rows, name=scale.name)
        if (kept := values.get(name)) is not None:
            kept.const_value = one.original


def is_depthwise(node: ir.Node) -> bool:
    """Returns whether the node is a grouped Conv whose filters each read a single input channel."""
    grouped = node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1
    weight = stored(operand(node, 1)) if grouped else None
    return weight is not None and weight.shape[1] == 1


def row_ranges(values: NDArray[Any], kept: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns the largest magnitude over all axes except `kept`, or 1 if all are zero; reduced axes have size 1."""
    others = tuple(one for one in range(values.ndim) if one not in kept)
    ranges = np.abs(values).max(axis=others, keepdims=True)
    return np.where(ranges > 0, ranges, 1).astype(np.float32)
