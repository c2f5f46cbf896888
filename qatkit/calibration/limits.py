"""Limits of ranges: ends beyond which the functions after a quantizer no longer tell values apart.

    Conv ─ [-59 .. 17] ─ SiLU ─ [-0.28 .. 17]        SiLU(x) rounds to 0 for each x below -5.7
    Conv ─ [ -6 .. 17] ─ SiLU                        the same output bytes, with steps of a third

A range is cut where the 8-bit result of each function that reads it stays the same, so the method that found the range
does not matter. The limits stay through fine-tuning, whose observers would widen the range again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.graph.nodes import facts, module_of
from qatkit.graph.quantizers import is_quantizer
from qatkit.quant.fake_quantize import FakeQuantize

# Points of a range at which a function is evaluated, and the fraction of a step of its result that may be
# lost.
_POINTS, _SHARE = 4096, 0.25
_BEYOND, _FURTHEST = 256, 8.0  # points beyond each end, up to 2^8 times the range: training may reach them


@torch.no_grad()
def set_limits(graph_module: fx.GraphModule) -> None:
    """Sets the limits of all quantizers from the ranges of their observers; scales follow with `align`."""
    for node in graph_module.graph.nodes:
        if is_quantizer(node):
            quantizer = cast(FakeQuantize, module_of(node))
            if quantizer.spec.form is None and quantizer.observer is not None and quantizer.observer.seen:
                quantizer.range_limits = _limits(node, quantizer)


def _limits(node: fx.Node, quantizer: FakeQuantize) -> Tensor | None:
    """Returns the widest limits [2] that the readers of a quantizer ask for; None if one of them has none."""
    assert quantizer.observer is not None
    low, high = float(quantizer.observer.low), float(quantizer.observer.high)
    x = _looked_at(low, high)
    found = [_told_apart(reader, x) for reader in _readers(node)]
    ends = [one for one in found if one is not None]
    if not ends or len(ends) < len(found):
        return None
    limits = max(low, min(end[0] for end in ends)), min(high, max(end[1] for end in ends))
    if limits == (low, high) or limits[0] >= limits[1]:
        return None
    return torch.tensor(limits, device=quantizer.scale.device)


def _looked_at(low: float, high: float) -> Tensor:
    """Returns points in and beyond a range, ascending."""
    beyond = (high - low) * torch.logspace(-8, _FURTHEST, _BEYOND, 2.0)
    return torch.cat([low - beyond.flip(0), torch.linspace(low, high, _POINTS), high + beyond])


def _readers(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that compute with the values of a quantizer, also after operators that only move them."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if facts(user).values == "moved" and user.op != "output" else [user]
    return found


def _told_apart(node: fx.Node, x: Tensor) -> tuple[float, float] | None:
    """Returns ends beyond which the rounded results of a node no longer change, however far its input values reach.

    Returns None if the node is not an elementwise function, or has no 8-bit result.

    Args:
        node: a reader.
        x: values that it may read, ascending.
    """
    steps = [_step(user) for user in node.users]
    if not facts(node).scalar or not steps or None in steps:
        return None
    y = _applied(node, x)
    most = _SHARE * min(step for step in steps if step is not None)
    below, above = _flat(y, most), _flat(y.flip(0), most)
    return float(x[max(0, below - 1)]), float(x[min(len(x) - 1, len(x) - above)])


def _flat(y: Tensor, most: float) -> int:
    """Returns how many values from the first on differ by at most `most` from the last of them."""
    off = torch.maximum(y.cummax(0).values - y, y - y.cummin(0).values)
    return int((off <= most).cumprod(0).sum())


def _step(node: fx.Node) -> float | None:
    """Returns the step of a quantizer; None for any other node."""
    if not is_quantizer(node):
        return None
    quantizer = cast(FakeQuantize, module_of(node))
    if quantizer.spec.form is not None:
        return None
    if not quantizer.movable:
        return float(quantizer.scale)
    assert quantizer.observer is not None
    return float(quantizer.qparams(quantizer.observer.low, quantizer.observer.high)[0])


def _applied(node: fx.Node, x: Tensor) -> Tensor:
    """Applies an elementwise function to x."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: x.clone())  # it may work in place
    if node.op == "call_module":
        function: Any = module_of(node)
    elif node.op == "call_method":
        function = getattr(torch.Tensor, str(node.target))
    else:
        function = node.target
    computed: Tensor = function(*args, **kwargs)
    return computed
