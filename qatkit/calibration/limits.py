"""Cuts off the parts of a quantizer's range in which the results of the next functions do not change.

    Conv ─ [-59 .. 17] ─ SiLU ─ [-0.28 .. 17]        SiLU(x) rounds to 0 for each x below -5.7
    Conv ─ [ -6 .. 17] ─ SiLU                        the same output bytes, with a third of the step size

A part at an end of the range is cut off if the quantized result of every function that reads the tensor is
constant there. This works for ranges from any method. The limits also apply during fine-tuning, where observers
would widen the range again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.graph.nodes import facts, module_of
from qatkit.graph.quantizers import is_quantizer
from qatkit.quant.fake_quantize import FakeQuantize

# The number of points of a range at which a function is evaluated, and the largest change of its result that is
# ignored, as a fraction of the step.
_POINTS, _SHARE = 4096, 0.25
_BEYOND, _FURTHEST = (
    256,
    8.0,
)  # number of points beyond each end, up to 2^8 times the range, which training may reach


@torch.no_grad()
def set_limits(graph_module: fx.GraphModule) -> None:
    """Sets the limits of all quantizers from the ranges of their observers; `align` then updates the scales."""
    for node in graph_module.graph.nodes:
        if is_quantizer(node):
            quantizer = cast(FakeQuantize, module_of(node))
            if quantizer.spec.form is None and quantizer.observer is not None and quantizer.observer.seen:
                quantizer.range_limits = _limits(node, quantizer)


def _limits(node: fx.Node, quantizer: FakeQuantize) -> Tensor | None:
    """Returns the limits [2] of a quantizer's range, which include the values that any of its readers needs.

    Returns None if nothing can be cut off, or if a reader needs all values (`_told_apart`).
    """
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
    """Returns points within a range and beyond its ends, in ascending order."""
    beyond = (high - low) * torch.logspace(-8, _FURTHEST, _BEYOND, 2.0)
    return torch.cat([low - beyond.flip(0), torch.linspace(low, high, _POINTS), high + beyond])


def _readers(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that compute with the values of a quantizer; operators that only move values are skipped."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if facts(user).values == "moved" and user.op != "output" else [user]
    return found


def _told_apart(node: fx.Node, x: Tensor) -> tuple[float, float] | None:
    """Returns the lowest and the highest input beyond which the rounded result of a node no longer changes.

    Returns None if the node is not an elementwise function, or if not all readers of its result are quantizers to
    integers.

    Args:
        node: a node that reads the quantizer.
        x: values that it may read, in ascending order.
    """
    steps = [_step(user) for user in node.users]
    if not facts(node).scalar or not steps or None in steps:
        return None
    y = _applied(node, x)
    most = _SHARE * min(step for step in steps if step is not None)
    below, above = _flat(y, most), _flat(y.flip(0), most)
    return float(x[max(0, below - 1)]), float(x[min(len(x) - 1, len(x) - above)])


def _flat(y: Tensor, most: float) -> int:
    """Returns the length of the longest beginning of y in which each value is within `most` of all earlier ones."""
    off = torch.maximum(y.cummax(0).values - y, y - y.cummin(0).values)
    return int((off <= most).cumprod(0).sum())


def _step(node: fx.Node) -> float | None:
    """Returns the scale of a quantizer; None for a quantizer to a number format, and for any other node."""
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
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda _: x.clone()
    )  # the function may write in place
    if node.op == "call_module":
        function: Any = module_of(node)
    elif node.op == "call_method":
        function = getattr(torch.Tensor, str(node.target))
    else:
        function = node.target
    computed: Tensor = function(*args, **kwargs)
    return computed
