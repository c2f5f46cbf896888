"""Joins operators that exporters write in parts: SiLU, HardSwish, HardSigmoid, GELU.

A joined operator has its own class in `qatkit.graph.operators`. A backend can therefore quantize it as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from qatkit.export.matching import by_number, clip_bounds, gelu_input, made, pairs

Match = Callable[[ir.Node], "tuple[str, ir.Value, dict[str, Any]] | None"]


def join_patterns(graph: ir.Graph) -> None:
    """Replaces the last node of each pattern by one operator; the other nodes run only if something reads them."""
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


def _silu(node: ir.Node) -> tuple[str, ir.Value, dict[str, Any]] | None:
    """Matches x · sigmoid(x)."""
    if node.op_type != "Mul":
        return None
    for x, gate in pairs(node):
        sigmoid = made(gate, "Sigmoid")
        if x is not None and sigmoid is not None and sigmoid.inputs[0] is x:
            return "Swish", x, {}
    return None


def _clipped_sum(value: ir.Value | None) -> ir.Value | None:
    """Returns x if the value is clip(x + 3, 0, 6)."""
    clip = made(value, "Clip")
    if clip is None:
        return None
    if clip_bounds(clip) != (0.0, 6.0):
        return None
    return by_number(made(clip.inputs[0], "Add"), "Add", 3.0)


def _hard_sigmoid(node: ir.Node) -> tuple[str, ir.Value, dict[str, Any]] | None:
    """Matches clip(x + 3, 0, 6) / 6."""
    inner = by_number(node, "Div", 6.0) or by_number(node, "Mul", 1 / 6)
    x = _clipped_sum(inner)
    return None if x is None else ("HardSigmoid", x, {"alpha": 1 / 6, "beta": 0.5})


def _hard_swish(node: ir.Node) -> tuple[str, ir.Value, dict[str, Any]] | None:
    """Matches x · hardsigmoid(x), or x · clip(x + 3, 0, 6) / 6."""
    if node.op_type == "Mul":
        for x, gate in pairs(node):
            hard = made(gate, "HardSigmoid")
            if x is None or hard is None or hard.inputs[0] is not x:
                continue
            alpha, beta = (
                hard.attributes[k].as_float() if k in hard.attributes else d
                for k, d in (("alpha", 0.2), ("beta", 0.5))
            )
            if math.isclose(alpha, 1 / 6, rel_tol=1e-4) and math.isclose(beta, 0.5, rel_tol=1e-6):
                return "HardSwish", x, {}
    inner = by_number(node, "Div", 6.0) or by_number(node, "Mul", 1 / 6)
    product = made(inner, "Mul")
    if product is None:
        return None
    for x, gate in pairs(product):
        if x is not None and _clipped_sum(gate) is x:
            return "HardSwish", x, {}
    return None


def _gelu(node: ir.Node) -> tuple[str, ir.Value, dict[str, Any]] | None:
    """Matches 0.5 · x · (1 + erf(x / √2))."""
    x = gelu_input(node)
    return None if x is None else ("Gelu", x, {})


_MATCHES: tuple[Match, ...] = (_silu, _hard_swish, _hard_sigmoid, _gelu)
