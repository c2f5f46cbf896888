"""Operators that exporters write in parts become one again: SiLU, HardSwish, GELU.

As one operator each has a class of its own in `qatkit.graph.operators`, with its placement and its form in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

Match = Callable[[ir.Node], "tuple[str, ir.Value, dict[str, Any]] | None"]


def join_patterns(graph: ir.Graph) -> None:
    """Replaces each pattern's last node by one operator; what it leaves unread stays and is not run."""
    for node in list(graph):
        if node.graph is None or not node.outputs:
            continue
        for match in _MATCHES:
            found = match(node)
            if found is None:
                continue
            operator, x, attributes = found
            items = [
                ir.Attr(k, ir.AttributeType.FLOAT, v) if isinstance(v, float) else ir.AttrString(k, v)
                for k, v in attributes.items()
            ]
            new = ir.Node("", operator, [x], items, name=node.name, num_outputs=1)
            new.outputs[0].shape, new.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
            old = node.outputs[0]
            name = old.name
            graph.insert_after(node, new)
            ir.convenience.replace_all_uses_with(old, new.outputs[0], replace_graph_outputs=True)
            graph.remove(node)
            new.outputs[0].name = name
            break


def _number(value: ir.Value | None) -> float | None:
    """Returns a constant of one value; None for anything else."""
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


def _is(value: ir.Value | None, operator: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator and node.domain in ("", "ai.onnx") else None


def _pairs(node: ir.Node) -> Sequence[tuple[ir.Value | None, ir.Value | None]]:
    a, b = node.inputs[:2]
    return ((a, b), (b, a))


def _by_number(node: ir.Node | None, operator: str, number: float) -> ir.Value | None:
    """Returns the other operand of an Add or Mul with a number (of a Div: by it)."""
    if node is None or node.op_type != operator:
        return None
    pairs = _pairs(node)[:1] if operator == "Div" else _pairs(node)
    for x, constant in pairs:
        known = _number(constant)
        if known is not None and math.isclose(known, number, rel_tol=1e-4):
            return x
    return None


def _silu(node: ir.Node) -> tuple[str, ir.Value, dict[str, Any]] | None:
    """X · sigmoid(x)."""
    if node.op_type != "Mul":
        return None
    for x, gate in _pairs(node):
        sigmoid = _is(gate, "Sigmoid")
        if x is not None and sigmoid is not None and sigmoid.inputs[0] is x:
            return "Swish", x, {}
    return None


def _clipped_sum(value: ir.Value | None) -> ir.Value | None:
    """Returns x of clip(x + 3, 0, 6)."""
    clip = _is(value, "Clip")
    if clip is None:
        return None
    bounds = [clip.attributes[key].as_float() if key in clip.attributes else None for key in ("min", "max")]
    if len(clip.inputs) > 1:
        bounds = [_number(v) for v in (*clip.inputs[1:], None)[:2]]
    if bounds != [0.0, 6.0]:
        return None
    return _by_number(_is(clip.inputs[0], "Add"), "Add", 3.0)


def _hard_sigmoid(node: ir.Node) -> tuple[str, ir.Value, dict[str, Any]] | None:
    """clip(x + 3, 0, 6) / 6."""
    inner = _by_number(node, "Div", 6.0) or _by_number(node, "Mul", 1 / 6)
    x = _clipped_sum(inner)
    return None if x is None else ("HardSigmoid", x, {"alpha": 1 / 6, "beta": 0.5})


def _hard_swish(node: ir.Node) -> tuple[str, ir.Value, dict[str, Any]] | None:
    """X · hardsigmoid(x), or x · clip(x + 3, 0, 6) / 6."""
    if node.op_type == "Mul":
        for x, gate in _pairs(node):
            hard = _is(gate, "HardSigmoid")
            if x is None or hard is None or hard.inputs[0] is not x:
                continue
            alpha, beta = (
                hard.attributes[k].as_float() if k in hard.attributes else d
                for k, d in (("alpha", 0.2), ("beta", 0.5))
            )
            if math.isclose(alpha, 1 / 6, rel_tol=1e-4) and math.isclose(beta, 0.5, rel_tol=1e-6):
                return "HardSwish", x, {}
    inner = _by_number(node, "Div", 6.0) or _by_number(node, "Mul", 1 / 6)
    product = _is(inner, "Mul")
    if product is None:
        return None
    for x, gate in _pairs(product):
        if x is not None and _clipped_sum(gate) is x:
            return "HardSwish", x, {}
    return None


def _gelu(node: ir.Node) -> tuple[str, ir.Value, dict[str, Any]] | None:
    """0.5 · x · (1 + erf(x / √2)), multiplied in any order."""
    if node.op_type != "Mul":
        return None
    factors = _factors(node, 3)
    halves = [
        value for value in factors if (number := _number(value)) is not None and math.isclose(number, 0.5)
    ]
    rest = [value for value in factors if value not in halves]
    if len(halves) != 1 or len(rest) != 2:
        return None
    for x, gate in (rest, rest[::-1]):
        erf = _is(_by_number(_is(gate, "Add"), "Add", 1.0), "Erf")
        if erf is None:
            continue
        producer = None if erf.inputs[0] is None else erf.inputs[0].producer()
        inner = _by_number(producer, "Div", math.sqrt(2)) or _by_number(producer, "Mul", 1 / math.sqrt(2))
        if inner is x and x is not None:
            return "Gelu", x, {}
    return None


def _factors(node: ir.Node, most: int) -> list[ir.Value]:
    """Returns the factors of a product of products."""
    found = [value for value in node.inputs if value is not None]
    while len(found) < most:
        inner = next((value for value in found if _is(value, "Mul") and len(value.uses()) == 1), None)
        if inner is None:
            break
        producer = inner.producer()
        assert producer is not None
        found.remove(inner)
        found += [value for value in producer.inputs if value is not None]
    return found


_MATCHES: tuple[Match, ...] = (_silu, _hard_swish, _hard_sigmoid, _gelu)
