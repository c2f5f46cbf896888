"""Finds the operators that compute final probabilities, which stay float32 in a float16 file.

    logits ── Sigmoid or Softmax ── Slice, Transpose, ... ──> output

In float16, the only probability above 0.9995 is 1. The best boxes of a detector would therefore have equal scores, and
would be sorted and suppressed in the wrong order. Logits keep eleven bits at any magnitude.
"""

from __future__ import annotations

import onnx_ir as ir

_MADE_BY = frozenset(["Sigmoid", "Softmax"])
_MOVED_BY = frozenset(["Slice", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Gather", "Split",
                       "Identity"])  # fmt: skip


def last_probabilities(model: ir.Model) -> list[str]:
    """Returns the names of the operators from the last Sigmoid or Softmax to an output, in the file's order."""
    kept, waiting = set[ir.Node](), list(model.graph.outputs)
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node is None or node in kept or not _probable(value):
            continue
        kept.add(node)
        if node.op_type not in _MADE_BY:
            waiting += [one for one in node.inputs if one is not None]
    return [str(node.name) for node in model.graph if node in kept]


def _probable(value: ir.Value | None) -> bool:
    """Returns whether a tensor contains probabilities.

    A Concat contains probabilities if one of its inputs does. A product (objectness times class) is a probability if
    both factors are.
    """
    node = None if value is None else value.producer()
    if node is None or node.domain:
        return False
    if node.op_type in _MADE_BY:
        return True
    if node.op_type in _MOVED_BY:
        return _probable(node.inputs[0])
    if node.op_type == "Concat":
        return any(map(_probable, node.inputs))
    return node.op_type == "Mul" and all(map(_probable, set(node.inputs)))
