"""Finds the operators whose values float16 cannot hold, from the ranges of a float run. They compute in float32.

- Too large: operators that compute or read a tensor or constant beyond 65504. For activations the limit is half of
  that, since other images may give larger values.
- Too small: operators that compute or read a tensor whose values are all below the normal numbers of float16. A
  constant counts only if float16 also changes its largest value by more than 5 %; small biases do not count.
- Sensitive near zero: a Log, a denominator, or a Pow with an exponent below 1, whose value or slope has no bound near
  zero. Small values matter there, so the operators that compute them stay float32 as well, including one that adds an
  epsilon. The chain ends at the first operator whose inputs have negative values or no small ones (such as the one that
  computes a power spectrum).
- Inner sums: norms and log-sum-exps whose squares or exponentials are too large, even if their results are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from qatkit.export.float_ranges import Range
from qatkit.verify.graph_view import constant, operand, stored

FLOAT16_MAX = 65504.0
_ACTIVATIONS_MAX = FLOAT16_MAX / 2
_NORMAL = 2.0**-14  # the smallest normal number of float16
_KEPT = 0.05  # the largest accepted relative change of a constant
# Operators whose value or slope has no bound as an input approaches zero, and the index of this input.
_SENSITIVE = {"Log": 0, "Div": 1, "Reciprocal": 0, "Pow": 0}
# Operators that may be between an epsilon and a sensitive operator.
_PASSED = frozenset(["Abs", "Add", "Sub", "Max", "Min", "Clip", "Sqrt", "Identity", "Cast", "Slice", "Reshape",
                     "Transpose", "Squeeze", "Unsqueeze", "Expand", "Flatten"])  # fmt: skip
_SQUARED = (
    "ReduceL2",
    "LpNormalization",
    "LayerNormalization",
    "InstanceNormalization",
    "GroupNormalization",
)
_EXPONENTIATED = ("ReduceLogSumExp",)
_DEEPEST = 64


def kept_in_float32(model: ir.Model, ranges: Mapping[str, Range]) -> list[str]:
    """Returns the names of the operators that cannot compute in float16, in the file's order.

    Args:
        model: the float model.
        ranges: the ranges of the model's tensors (`qatkit.export.float_ranges`).
    """
    found: set[ir.Node] = set()
    for node in model.graph:
        if _leaves_range(node, ranges) or _sums_inside(node, ranges):
            found.add(node)
        index = _SENSITIVE.get(node.op_type, -1)
        value = operand(node, index) if index >= 0 and not node.domain else None
        if value is None or not _grows_near_zero(node) or stored(value) is not None:
            continue
        path = set(_small_makers(value, ranges)) | set(_epsilon_path(value))
        found |= path | ({node} if path else set())
    return [str(node.name) for node in model.graph if node in found]


def _range(value: ir.Value | None, ranges: Mapping[str, Range]) -> Range | None:
    return None if value is None else ranges.get(str(value.name))


def _leaves_range(node: ir.Node, ranges: Mapping[str, Range]) -> bool:
    """Returns whether an input or output has a value too large for float16, or only values that are too small."""
    for place, value in enumerate((*node.inputs, *node.outputs)):
        known = _range(value, ranges)
        if known is None or known.largest == 0:
            continue
        held = stored(value) is not None
        if known.largest > (FLOAT16_MAX if held else _ACTIVATIONS_MAX):
            return True
        # A tiny bias is ignored; an epsilon matters only if a sensitive operator follows.
        harmless = held and (place > 1 or node.op_type in _PASSED or _is_kept(known.largest))
        if known.largest < _NORMAL and not harmless:
            return True
    return False


def _sums_inside(node: ir.Node, ranges: Mapping[str, Range]) -> bool:
    known, made = _range(operand(node, 0), ranges), _range(next(iter(node.outputs), None), ranges)
    if known is None or made is None or node.domain:
        return False
    if node.op_type in _EXPONENTIATED:
        return made.largest > math.log(_ACTIVATIONS_MAX)
    if node.op_type == "ReduceL2":
        return made.largest**2 > _ACTIVATIONS_MAX
    return node.op_type in _SQUARED and known.largest**2 > _ACTIVATIONS_MAX


def _grows_near_zero(node: ir.Node) -> bool:
    """Returns whether small inputs of a sensitive operator matter; in a Pow, only with a constant exponent below 1."""
    exponent = constant(operand(node, 1)) if node.op_type == "Pow" else None
    return node.op_type != "Pow" or (exponent is not None and bool((exponent < 1).any()))


def _small_makers(value: ir.Value, ranges: Mapping[str, Range]) -> Iterator[ir.Node]:
    """Yields the operators that compute small values of `value`, if it has any.

    The operators before them follow, as long as the tensors in between have small values and no negative ones.
    """
    waiting, seen, first = [(value, 0)], {value}, True
    while waiting:
        one, depth = waiting.pop()
        known, maker = _range(one, ranges), one.producer()
        small = known is not None and known.least < _NORMAL and (first or known.low >= 0)
        first = False
        if not small or maker is None or depth > _DEEPEST:
            continue
        yield maker
        above = [more for more in maker.inputs if more is not None and more not in seen]
        seen.update(above)
        waiting += [(more, depth + 1) for more in above]


def _epsilon_path(value: ir.Value, depth: int = 8) -> list[ir.Node]:
    """Returns the operators on a path from an operator with an epsilon that is too small for float16 to `value`.

    The result is empty if there is no such path.
    """
    maker = value.producer()
    if maker is None or depth == 0 or maker.op_type not in _PASSED:
        return []
    constants = [
        held for held in map(constant, maker.inputs) if held is not None and held.dtype == np.float32
    ]
    if any(held.size == 1 and not _is_kept(float(held.reshape(-1)[0])) for held in constants):
        return [maker]
    for one in maker.inputs:
        path = [] if one is None else _epsilon_path(one, depth - 1)
        if path:
            return [*path, maker]
    return []


def _is_kept(number: float) -> bool:
    """Returns whether float16 represents a number with a relative error of at most 5 %; only small ones may fail."""
    small = 0 < abs(number) < _NORMAL
    return not small or abs(float(np.float16(number)) - number) <= _KEPT * abs(number)
