"""Align: activation scales whose results never land near a rounding boundary.

An 8-bit kernel rounds a sum of integers once: q_y = round(Σ·M). In floating point, which is how the simulation
and an unoptimized runtime compute it, the same sum is off by a hundredth of an integer or so. Where Σ·M falls
that close to k + ½ the two round apart: once in 10⁵ values, and a deep network makes another class of it in
every 300th image. If M is a fraction p/q with q odd, p·Σ/q is never nearer to k + ½ than 1/(2q), and all
ways to compute it give the same byte, unless q is so large (thousands) that 1/(2q) is below a float32 sum's own
error. So every scale moves up by a fraction of a percent:

    Conv, Linear      s_x·s_w/s_y = p/q            moves s_w (`qatkit.weight_fake_quantize.WeightFakeQuantize`)
    Mul               s_a·s_b/s_y = p/q            moves s_y, else s_a or s_b
    average pool      s_x/(n·s_y) = p/q            n values each; moves s_y, else s_x
    HardSigmoid       s_x/(6/255) = p/1021         moves s_x; its 3 is half a step off (127.5), and a prime
                                                   above 255 keeps all bytes but 0 off the whole steps
    Add, Cat          s_a/s_y = i/j, j odd         a common unit for all that meet in sums; where their ranges
                                                   are too far apart (a deep residual stream), one unit a sum
    SiLU, Sigmoid     256 possible results         moves s_y, else s_x, until none of them is near a tie

Measured on 10,000 images: docs/design.md, D12.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, fx

from qatkit.fake_quantize import FakeQuantize
from qatkit.graph.nodes import facts, module_of, op_class
from qatkit.graph.quantizers import is_quantizer, quantizer_after, quantizer_of
from qatkit.numerics import odd_fraction

# The largest scale of a group of sums, in units of that group: fine enough that a scale moves by 1/2047 of the
# largest at most, and coarse enough that float32 resolves half a unit of a sum (1/4094 of a step).
_UNITS = 2047
_PRIME = 1021
_LARGEST_MOVE = 1.03
# The fewest units a scale may have: a move to the next odd number is 2 units at most, 3 % of it.
_FINEST = 67
# Of 256 results, how near to a tie the nearest may come, in steps; and the moves of a scale that are tried.
_MARGIN, _MOVES = 1e-3, [1 + i / 4096 for i in range(41)]


def align(graph_module: fx.GraphModule) -> None:
    """Sets the scales of all activations from their observers' ranges, then moves them into place.

    The outcome is a function of the ranges alone: a second call changes nothing.
    """
    quantizers = [cast(FakeQuantize, module_of(n)) for n in graph_module.graph.nodes if is_quantizer(n)]
    for quantizer in quantizers:
        quantizer.settle()
    settled = {id(q) for q in quantizers if not q.movable}
    for group in _groups(graph_module):
        if any(id(q) in settled for q in group):
            settled.update(id(q) for q in group)
        elif min(q.scale for q in group) * _UNITS >= _FINEST * max(q.scale for q in group):
            _one_unit(group)
            settled.update(id(q) for q in group)
    for node in graph_module.graph.nodes:
        _align_operator(node, settled)


def _groups(graph_module: fx.GraphModule) -> list[list[FakeQuantize]]:
    """The quantizers that meet in sums, directly or through other sums; each in one group."""
    groups: list[list[FakeQuantize]] = []
    for node in graph_module.graph.nodes:
        if facts(node).align != "sum":
            continue
        meeting = _around(node)
        if meeting is None:
            continue
        joined = [g for g in groups if any(a is b for a in g for b in meeting)]
        groups = [g for g in groups if g not in joined] + [_unique(sum(joined, meeting))]
    return groups


def _unique(quantizers: Iterable[FakeQuantize]) -> list[FakeQuantize]:
    return list({id(q): q for q in quantizers}.values())


def _around(node: fx.Node) -> list[FakeQuantize] | None:
    """The quantizers of all inputs and of the output; None where one is missing."""
    found = [*map(quantizer_of, node.all_input_nodes), quantizer_after(node)]
    return None if None in found else [cast(FakeQuantize, module_of(cast(fx.Node, n))) for n in found]


def _one_unit(group: list[FakeQuantize]) -> None:
    """Every scale up to the next odd multiple of a common unit."""
    unit = max(q.scale.double() for q in group) / _UNITS
    for quantizer in group:
        steps = torch.ceil((quantizer.scale.double() / unit - 1) / 2 - 1e-6) * 2 + 1
        _move(quantizer, unit * steps)


def _move(quantizer: FakeQuantize, scale: Tensor) -> None:
    """To a coarser scale, unless that would cost a range too small for its neighbours much of its resolution."""
    if 0 < scale <= _LARGEST_MOVE * quantizer.scale.double():
        quantizer.scale.copy_(scale)


def _align_operator(node: fx.Node, settled: set[int]) -> None:
    kind = facts(node).align
    if kind == "hardsigmoid":
        before = quantizer_of(node.args[0])
        if before is not None:
            _fit_hardsigmoid(cast(FakeQuantize, module_of(before)), settled)
        return
    found = _around(node) if kind else None
    if found is None:
        return
    *inputs, after = found
    if kind == "sum":
        _fit_sum(_unique(inputs), after, settled)
    elif kind == "table":
        _fit_table(node, inputs[0], after, settled)
    elif kind == "mean":
        _fit(inputs, after, _window(node), settled)
    elif len(inputs) == 2:
        _fit(inputs, after, 1, settled)


def _fit_sum(inputs: list[FakeQuantize], after: FakeQuantize, settled: set[int]) -> None:
    """The unit of one sum, from the input that is settled already, or from the widest."""
    anchors = [q for q in inputs if id(q) in settled]
    if id(after) not in settled and len(anchors) <= 1:
        anchor = anchors[0] if anchors else max(inputs, key=lambda q: float(q.scale))
        target = after.scale.double()
        unit = anchor.scale.double() / torch.round(_UNITS * anchor.scale.double() / target).clamp(min=1)
        _move(after, (torch.ceil((target / unit - 1) / 2 - 1e-6) * 2 + 1) * unit)
        for other in inputs:
            if other is not anchor:
                _move(other, torch.ceil(other.scale.double() / unit - 1e-6) * unit)
    settled.update(id(q) for q in (*inputs, after))


def _fit_hardsigmoid(before: FakeQuantize, settled: set[int]) -> None:
    if id(before) not in settled:
        unit = 6.0 / (before.spec.quant_max - before.spec.quant_min) / _PRIME
        _move(before, torch.ceil(before.scale.double() / unit - 1e-6) * unit)
        settled.add(id(before))


def _fit_table(node: fx.Node, before: FakeQuantize, after: FakeQuantize, settled: set[int]) -> None:
    """Moves one scale, by at most 1 %, to where the margin is kept (or is largest)."""
    moved = next((q for q in (after, before) if id(q) not in settled), None)
    if moved is not None:
        raw = moved.scale.double()
        margins = []
        for move in _MOVES:
            moved.scale.copy_(raw * move)
            margins.append(_nearest_tie(node, before, after))
            if margins[-1] >= _MARGIN:
                break
        else:
            moved.scale.copy_(raw * _MOVES[margins.index(max(margins))])
    settled.update((id(before), id(after)))


def _nearest_tie(node: fx.Node, before: FakeQuantize, after: FakeQuantize) -> float:
    """How near any of the operator's results comes to k + 1/2, in steps; zero, which no scale moves, aside."""
    low, high = before.spec.type_range
    q = torch.arange(low, high + 1, dtype=torch.float64) - before.zero_point
    x = (q[q != 0] * before.scale).float()
    steps = _apply(node, x).double() / after.scale
    return float((steps - steps.floor() - 0.5).abs().min())


def _apply(node: fx.Node, x: Tensor) -> Tensor:
    """A unary operator on other values than its own."""
    result: Tensor = (
        module_of(node)(x)
        if node.op == "call_module"
        else getattr(x, str(node.target))(*node.args[1:], **node.kwargs)
        if node.op == "call_method"
        else cast(Any, node.target)(x, *node.args[1:], **node.kwargs)
    )
    return result


def _fit(inputs: list[FakeQuantize], after: FakeQuantize, count: int, settled: set[int]) -> None:
    """Moves one scale, the output's if it is free, so that (product of inputs' scales)/(count·after) = p/q."""
    product = math.prod((q.scale.double() for q in inputs), start=torch.tensor(1.0, dtype=torch.float64))
    wanted = product / (count * after.scale.double())
    free = [q for q in inputs if id(q) not in settled]
    if id(after) not in settled:
        after.scale.copy_(product / (count * odd_fraction(wanted, up=False)))
    elif free and len(_unique(inputs)) == len(inputs):
        free[0].scale.copy_(free[0].scale.double() * (odd_fraction(wanted, up=True) / wanted))
    settled.update(id(q) for q in (*inputs, after))


def _window(node: fx.Node) -> int:
    """How many values an average pool takes the mean of."""
    sizes = node.all_input_nodes[0].meta["value"].shape[2:]
    if op_class(node) == "global_pool":
        return math.prod(sizes)
    if node.op == "call_module":
        size: Any = module_of(node).kernel_size
    else:
        size = node.args[1] if len(node.args) > 1 else node.kwargs["kernel_size"]
    return math.prod(size) if isinstance(size, (tuple, list)) else int(size) ** len(sizes)
