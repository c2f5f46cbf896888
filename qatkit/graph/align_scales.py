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
from collections.abc import Callable, Iterable
from functools import partial
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

Flag = bool | Tensor
Rule = Callable[[dict[int, Flag]], None]


def align(graph_module: fx.GraphModule) -> None:
    """Sets the scales of all activations from their observers' ranges, then moves them into place.

    The outcome is a function of the ranges alone: a second call changes nothing.
    """
    Alignment(graph_module)()


class Alignment:
    """What the scales of one graph have to do with each other, found once; each call moves them into place.

    A call reads no value on the host, so that learned scales can be aligned before every step of the training. What
    is settled is a plain bool where the graph alone says so, and else a tensor.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        found = [cast(FakeQuantize, module_of(n)) for n in graph_module.graph.nodes if is_quantizer(n)]
        self._moving = [q for q in found if q.movable]
        moving = {id(q) for q in self._moving}
        self._settled: dict[int, Flag] = {id(q): id(q) not in moving for q in found}
        self._groups = _groups(graph_module)
        rules = [_rule(node) for node in graph_module.graph.nodes]
        self._rules = [rule for rule in rules if rule is not None]

    @torch.no_grad()
    def __call__(self) -> None:
        settled = dict(self._settled)
        for quantizer in self._moving:
            quantizer.settle()
        for group in self._groups:
            _one_unit(group, settled)
        for rule in self._rules:
            rule(settled)


def _free(flag: Flag) -> Flag:
    return not flag if isinstance(flag, bool) else ~flag


def _set(quantizer: FakeQuantize, scale: Tensor, when: Flag) -> None:
    if when is True:
        quantizer.scale.copy_(scale)
    elif when is not False:
        quantizer.scale.copy_(torch.where(when, scale, quantizer.scale.double()))


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


def _one_unit(group: list[FakeQuantize], settled: dict[int, Flag]) -> None:
    """Every scale up to the next odd multiple of a common unit, unless one is settled or they are too far apart."""
    given = torch.stack([q.scale for q in group])
    scales = given.double()
    known = _any(settled[id(q)] for q in group)
    fits = given.min() * _UNITS >= _FINEST * given.max()
    unit = scales.max() / _UNITS
    steps = torch.ceil((scales / unit - 1) / 2 - 1e-6) * 2 + 1
    for quantizer, scale in zip(group, (unit * steps).unbind(), strict=True):
        _move(quantizer, scale, fits & _free(known))
    settled.update({id(q): known | fits for q in group})


def _any(flags: Iterable[Flag]) -> Flag:
    found: Flag = False
    for flag in flags:
        found = found | flag
    return found


def _move(quantizer: FakeQuantize, scale: Tensor, when: Flag) -> None:
    """To a coarser scale, unless that would cost a range too small for its neighbours much of its resolution."""
    if when is not False:
        _set(quantizer, scale, (scale > 0) & (scale <= _LARGEST_MOVE * quantizer.scale.double()) & when)


def _rule(node: fx.Node) -> Rule | None:
    """What aligns the scales around an operator, if anything does."""
    kind = facts(node).align
    if kind == "hardsigmoid":
        before = quantizer_of(node.args[0])
        return None if before is None else partial(_fit_hardsigmoid, cast(FakeQuantize, module_of(before)))
    found = _around(node) if kind else None
    if found is None:
        return None
    *inputs, after = found
    if kind == "sum":
        return partial(_fit_sum, _unique(inputs), after)
    if kind == "table":
        return partial(_fit_table, node, inputs[0], after)
    if kind == "mean":
        return partial(_fit, inputs, after, _window(node))
    return partial(_fit, inputs, after, 1) if len(inputs) == 2 else None


def _fit_sum(inputs: list[FakeQuantize], after: FakeQuantize, settled: dict[int, Flag]) -> None:
    """The unit of one sum, from the input that is settled already, or from the widest."""
    scales = torch.stack([q.scale.double() for q in inputs])
    known = torch.stack([torch.zeros_like(scales[0], dtype=torch.bool) | settled[id(q)] for q in inputs])
    chosen = torch.where(known, torch.inf, scales).argmax()
    anchor, target = scales[chosen], after.scale.double()
    when = (known.sum() <= 1) & _free(settled[id(after)])
    unit = anchor / torch.round(_UNITS * anchor / target).clamp(min=1)
    _move(after, (torch.ceil((target / unit - 1) / 2 - 1e-6) * 2 + 1) * unit, when)
    for index, (other, scale) in enumerate(zip(inputs, scales.unbind(), strict=True)):
        _move(other, torch.ceil(scale / unit - 1e-6) * unit, when & (chosen != index))
    settled.update({id(q): True for q in (*inputs, after)})


def _fit_hardsigmoid(before: FakeQuantize, settled: dict[int, Flag]) -> None:
    unit = 6.0 / (before.spec.quant_max - before.spec.quant_min) / _PRIME
    _move(before, torch.ceil(before.scale.double() / unit - 1e-6) * unit, _free(settled[id(before)]))
    settled[id(before)] = True


def _fit_table(node: fx.Node, before: FakeQuantize, after: FakeQuantize, settled: dict[int, Flag]) -> None:
    """Moves one scale, by at most 1 %, to where the margin is kept (or is largest)."""
    free = _free(settled[id(after)])
    turns = ((after, free), (before, _free(settled[id(before)]) & _free(free)))
    for moved, when in turns:
        if when is not False:
            candidates = moved.scale.double() * torch.tensor(
                _MOVES, dtype=torch.float64, device=moved.scale.device
            )
            scales = {
                id(before): before.scale,
                id(after): after.scale,
                id(moved): candidates.float()[:, None],
            }
            margins = _nearest_ties(node, before, scales[id(before)], scales[id(after)])
            kept = margins >= _MARGIN
            index = torch.where(kept.any(), kept.int().argmax(), margins.argmax())
            _set(moved, candidates[index], when)
    settled.update({id(before): True, id(after): True})


def _nearest_ties(node: fx.Node, before: FakeQuantize, scale: Tensor, after: Tensor) -> Tensor:
    """How near any of the operator's results comes to k + 1/2, in steps; zero, which no scale moves, aside.

    Args:
        scale, after: of its input and of its output, the one or the other of [candidates, 1].

    Returns:
        [candidates]
    """
    low, high = before.spec.type_range
    q = torch.arange(low, high + 1, dtype=torch.float64, device=scale.device) - before.zero_point
    steps = _apply(node, (q * scale).float()).double() / after
    return (steps - steps.floor() - 0.5).abs().masked_fill(q == 0, torch.inf).amin(1)


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


def _fit(inputs: list[FakeQuantize], after: FakeQuantize, count: int, settled: dict[int, Flag]) -> None:
    """Moves one scale, the output's if it is free, so that (product of inputs' scales)/(count·after) = p/q."""
    product = math.prod((q.scale.double() for q in inputs[1:]), start=inputs[0].scale.double())
    wanted = product / (count * after.scale.double())
    left = settled[id(after)]
    _set(after, product / (count * odd_fraction(wanted, up=False)), _free(left))
    for quantizer in inputs if len(_unique(inputs)) == len(inputs) else ():
        when = left & _free(settled[id(quantizer)])
        _set(quantizer, quantizer.scale.double() * (odd_fraction(wanted, up=True) / wanted), when)
        left = left & _free(when)
    settled.update({id(q): True for q in (*inputs, after)})


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
