"""Limits of ranges: ends beyond which the functions behind a quantizer don't tell values apart.

    Conv ─ [-59 .. 17] ─ SiLU ─ [-0.28 .. 17]        SiLU(x) rounds to 0 for each x below -5.7
    Conv ─ [ -6 .. 17] ─ SiLU                        the same bytes behind it, by steps of a third

A range is cut where the 8-bit result of each function that reads it stays the same, so this holds whichever way the
range was found. The limits stay through fine-tuning, whose observers would widen the range again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.graph.nodes import facts, module_of
from qatkit.graph.quantizers import is_quantizer
from qatkit.quant.fake_quantize import FakeQuantize

# Values of a range at which a function is looked at, and the share of a step of its result that may be lost.
_POINTS, _SHARE = 4096, 0.25
_BEYOND, _FURTHEST = 256, 8.0  # values beyond each end, up to 2^8 times the range: training may reach them


@torch.no_grad()
def set_limits(graph_module: fx.GraphModule) -> None:
    """Sets the limits of all quantizers from the ranges of their observers; scales follow with `align`."""
    for node in graph_module.graph.nodes:
        if is_quantizer(node):
            quantizer = cast(FakeQuantize, module_of(node))
            if quantizer.observer is not None and quantizer.observer.seen:
                quantizer.range_limits = _limits(node, quantizer)


def _limits(node: fx.Node, quantizer: FakeQuantize) -> Tensor | None:
    """Returns the widest limits [2] that the readers of a quantizer ask for; None where one of them has none."""
    assert quantizer.observer is not None
    low, high = float(quantizer.observer.low), float(quantizer.observer.high)
    values: dict[fx.Node, Tensor | None] = {node: _looked_at(low, high)}
    found = [_told_apart(reader, node, values) for reader in _readers(node)]
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
    """The nodes that compute with the values of a quantizer, wherever these are moved."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user) if facts(user).values == "moved" and user.op != "output" else [user]
    return found


def _told_apart(
    node: fx.Node, quantizer: fx.Node, values: dict[fx.Node, Tensor | None]
) -> tuple[float, float] | None:
    """Returns ends beyond which the rounded results of a node are those at the ends, however far values reach.

    None where it is no function of the quantizer's values alone, or has no 8-bit result.

    Args:
        node: a reader.
        quantizer: that it reads.
        values: of the quantizer, by its node; those of what is looked at on the way are added.
    """
    x = cast(Tensor, values[quantizer])
    steps = [_step(user) for user in node.users]
    y = _computed(node, values)
    if y is None or not steps or None in steps:
        return None
    most = _SHARE * min(step for step in steps if step is not None)
    below, above = _flat(y, most), _flat(y.flip(0), most)
    return float(x[max(0, below - 1)]), float(x[min(len(x) - 1, len(x) - above)])


def _flat(y: Tensor, most: float) -> int:
    """Returns how many values from the first on are no further than `most` from the last of them."""
    off = torch.maximum(y.cummax(0).values - y, y - y.cummin(0).values)
    return int((off <= most).cumprod(0).sum())


def _step(node: fx.Node) -> float | None:
    """Returns the step of a quantizer; None of another node."""
    if not is_quantizer(node):
        return None
    quantizer = cast(FakeQuantize, module_of(node))
    if not quantizer.movable:
        return float(quantizer.scale)
    assert quantizer.observer is not None
    return float(quantizer.qparams(quantizer.observer.low, quantizer.observer.high)[0])


def _computed(node: Any, values: dict[fx.Node, Tensor | None]) -> Tensor | None:
    """Returns the value of a node at all points, not rounded; None where it depends on anything else."""
    if node not in values:
        values[node] = _from_inputs(node, values)
    return values[node]


def _from_inputs(node: fx.Node, values: dict[fx.Node, Tensor | None]) -> Tensor | None:
    kind = facts(node)
    same = is_quantizer(node) or kind.values == "moved"
    if not node.all_input_nodes or not (same or kind.scalar):
        return None
    if any(_computed(one, values) is None for one in node.all_input_nodes):
        return None
    return values[node.all_input_nodes[0]] if same else _applied(node, values)


def _applied(node: fx.Node, values: dict[fx.Node, Tensor | None]) -> Tensor:
    def of(one: fx.Node) -> Tensor:
        return cast(Tensor, values[one]).clone()  # what reads it may work in place

    args, kwargs = fx.node.map_arg(node.args, of), fx.node.map_arg(node.kwargs, of)
    if node.op == "call_module":
        function: Any = module_of(node)
    elif node.op == "call_method":
        function = getattr(torch.Tensor, str(node.target))
    else:
        function = node.target
    computed: Tensor = function(*cast(Any, args), **kwargs)
    return computed
