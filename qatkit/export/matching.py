"""Helpers that inspect the nodes of a graph, for code that looks for patterns in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir


def number(value: ir.Value | None) -> float | None:
    """Returns the value of a constant with one element; None for anything else."""
    if value is None:
        return None
    held = value.const_value
    producer = value.producer()
    if held is None and producer is not None and producer.op_type == "Constant":
        item = producer.attributes.get("value") or producer.attributes.get("value_float")
        held = None if item is None else item.value
    if held is None or isinstance(held, (int, float)):
        return None if held is None else float(held)
    known = np.asarray(held.numpy()) if hasattr(held, "numpy") else np.asarray(held)
    return float(known.reshape(-1)[0]) if known.size == 1 and known.dtype.kind in "fiu" else None


def made(value: ir.Value | None, operator: str) -> ir.Node | None:
    """Returns the node that computes a value if it is this ONNX operator; otherwise None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator and node.domain in ("", "ai.onnx") else None


def pairs(node: ir.Node) -> Sequence[tuple[ir.Value | None, ir.Value | None]]:
    """Returns the two operands of a node in both orders."""
    a, b = node.inputs[:2]
    return ((a, b), (b, a))


def by_number(node: ir.Node | None, operator: str, wanted: float) -> ir.Value | None:
    """Returns the other operand if the node adds or multiplies `wanted`, or the dividend if it divides by `wanted`."""
    if node is None or node.op_type != operator:
        return None
    for x, held in pairs(node)[:1] if operator == "Div" else pairs(node):
        known = number(held)
        if known is not None and math.isclose(known, wanted, rel_tol=1e-4):
            return x
    return None


def clip_bounds(node: ir.Node) -> tuple[float | None, float | None]:
    """Returns the bounds of a Clip; None for a bound that is omitted or computed."""
    if len(node.inputs) > 1:
        low, high = (number(value) for value in (*node.inputs[1:], None, None)[:2])
        return low, high
    low, high = (
        node.attributes[key].as_float() if key in node.attributes else None for key in ("min", "max")
    )
    return low, high


def is_open(node: ir.Node, end: str) -> bool:
    """Returns whether a bound (`end` is "min" or "max") of a float Clip is omitted, infinite or float32's limit."""
    place = 1 if end == "min" else 2
    if len(node.inputs) > place and node.inputs[place] is not None:
        bound = number(node.inputs[place])
    elif end in node.attributes:
        bound = node.attributes[end].as_float()
    else:
        return True
    return bound is not None and abs(bound) >= float(np.finfo(np.float32).max)


def factors(node: ir.Node, most: int) -> list[ir.Value]:
    """Returns the factors of a Mul, up to `most`; a factor that is itself a product with no other reader is split."""
    found = [value for value in node.inputs if value is not None]
    while len(found) < most:
        inner = next((value for value in found if made(value, "Mul") and len(value.uses()) == 1), None)
        if inner is None:
            break
        producer = inner.producer()
        assert producer is not None
        found.remove(inner)
        found += [value for value in producer.inputs if value is not None]
    return found


def gelu_input(node: ir.Node) -> ir.Value | None:
    """Returns x if the node computes 0.5 · x · (1 + erf(x / √2)), multiplied in any order."""
    if node.op_type != "Mul":
        return None
    found = factors(node, 3)
    halves = [value for value in found if (known := number(value)) is not None and math.isclose(known, 0.5)]
    rest = [value for value in found if value not in halves]
    if len(halves) != 1 or len(rest) != 2:
        return None
    for x, gate in (rest, rest[::-1]):
        erf = made(by_number(made(gate, "Add"), "Add", 1.0), "Erf")
        if erf is None:
            continue
        producer = None if erf.inputs[0] is None else erf.inputs[0].producer()
        inner = by_number(producer, "Div", math.sqrt(2)) or by_number(producer, "Mul", 1 / math.sqrt(2))
        if inner is x and x is not None:
            return x
    return None
