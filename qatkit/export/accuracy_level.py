"""Reads and sets the accuracy level of products with packed weights (MatMulNBits).

    0   ONNX Runtime keeps activations in float, like the simulation.
    4   ONNX Runtime rounds activations to 8 bits in blocks and uses integer kernels, which is faster.

Source: ONNX Runtime, docs/ContribOperators.md, com.microsoft.MatMulNBits.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper

from qatkit_verify.files import whole

FLOAT, INT8 = 0, 4
_OPERATOR, _ATTRIBUTE = "MatMulNBits", "accuracy_level"


def level_of(path: Path) -> int:
    """Returns the highest accuracy level of a file's MatMulNBits nodes; 0 if none of them sets a level."""
    nodes = onnx.load(path).graph.node
    return max((one.i for node in nodes for one in node.attribute if one.name == _ATTRIBUTE), default=FLOAT)


def multiplies_packed(path: Path) -> bool:
    """Returns whether a file has products with packed weights."""
    return any(node.op_type == _OPERATOR for node in onnx.load(path, load_external_data=False).graph.node)


def at_level(source: Path, path: Path, level: int) -> None:
    """Writes a copy of `source` whose MatMulNBits nodes have accuracy level `level`, atomically."""
    model = onnx.load(source)
    for node in model.graph.node:
        if node.op_type == _OPERATOR:
            kept = [one for one in node.attribute if one.name != _ATTRIBUTE]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute(_ATTRIBUTE, level)])
    with whole(path) as temporary:
        temporary.write_bytes(model.SerializeToString(deterministic=True))
