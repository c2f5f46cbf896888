"""Finds the tables (of embeddings, one-hot encodings) that an input of a file indexes.

Valid indices are below the number of rows of each table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

# Operators whose output contains only values of their first input.
_PASSING = (
    "Cast",
    "Expand",
    "Flatten",
    "Identity",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
)
_STANDARD = ("", "ai.onnx")


def rows_indexed_by(value: ir.Value) -> int | None:
    """Returns the number of rows of the smallest table that a value indexes by a Gather or a one-hot encoding.

    None if no table of known size is found. The search ends where the value is changed, such as by adding an offset.
    """
    found, waiting, seen = list[int](), [value], set[ir.Value]()
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        for node, place in here.uses():
            if node.domain not in _STANDARD:
                continue
            rows = _rows(node, place)
            found += [] if rows is None else [rows]
            if node.op_type in _PASSING and place == 0:
                waiting += node.outputs
    return min(found, default=None)


def _rows(node: ir.Node, place: int) -> int | None:
    """Returns the number of rows of the table in which a node looks up its input with index `place`; None: unknown."""
    if node.op_type == "Gather" and place == 1 and node.inputs[0] is not None:
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        sizes = _shape(node.inputs[0])
        size = sizes[axis] if sizes and -len(sizes) <= axis < len(sizes) else None
        return size if isinstance(size, int) and size > 0 else None
    if node.op_type == "OneHot" and place == 0 and node.inputs[1] is not None:
        depth = ir.convenience.get_const_tensor(node.inputs[1])
        return None if depth is None else int(depth.numpy().reshape(-1)[0])
    if node.op_type == "Equal" and len(node.inputs) == 2:
        other = node.inputs[1 - place]
        classes = None if other is None else ir.convenience.get_const_tensor(other)
        return None if classes is None else _classes(classes.numpy())
    return None


def _classes(compared: NDArray[Any]) -> int | None:
    """Returns the number of classes of a one-hot that is a comparison with 0, 1, 2, ...; None for other constants."""
    counted = compared.size > 1 and np.array_equal(compared.reshape(-1), np.arange(compared.size))
    return compared.size if counted else None


def _shape(table: ir.Value) -> list[object]:
    """Returns the shape of a table, or of the values of a constant."""
    held = ir.convenience.get_const_tensor(table)
    if held is not None:
        return list(held.shape)
    return [] if table.shape is None else list(table.shape)
