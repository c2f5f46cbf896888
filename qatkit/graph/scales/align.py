"""Aligns activation scales so that results never land near a rounding boundary.

An 8-bit kernel rounds a sum of integers once: q_y = round(Σ·M). The simulation and an unoptimized runtime compute the
same sum in floating point, with an error of about a hundredth of an integer. Where Σ·M is that close to k + ½, the two
round differently. This happens once in 10⁵ values, which in a deep network changes the class of every 300th image. If M
is a fraction p/q with q odd, p·Σ/q is never nearer to k + ½ than 1/(2q), and all ways to compute it give the same byte.
Only if q is so large (thousands) that 1/(2q) is below the error of a float32 sum do they differ. Every scale is
therefore moved up, usually by a fraction of a percent:

    Conv, Linear      s_x·s_w/s_y = p/q            moves s_w (`qatkit.quant.weight_fake_quantize.WeightFakeQuantize`)
    Mul               s_a·s_b/s_y = p/q            moves s_y, else s_a or s_b
    average pool      s_x/(n·s_y) = p/q            for means of n values; moves s_y, else s_x
    HardSigmoid       s_x/(6/255) = p/1021         moves s_x; (x + 3)/6 is at a tie where x is a multiple of
                                                   6/255: with a prime above 255, only where x is 0
    Add, Cat          s_a/s_y = i/j, j odd         a common unit for all tensors that meet in sums; if their ranges
                                                   are too far apart (a deep residual stream), one unit per sum
    SiLU, Sigmoid     256 possible results         moves s_y, else s_x, until no result is near a tie

Before that, tensors that share a scale get a common one (`qatkit.graph.scales.shared`). Scales that are powers of two
need none of these moves. If the backend bounds its shifts, their scales are moved to meet the bounds instead
(`qatkit.graph.scales.shifts`).

Learned scales are aligned before every step. Operators that have no quantizer in common are therefore aligned together,
and a call costs a few dozen vector operations whatever the number of scales. Measurements: decisions 12 and 31.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any, cast

import torch
from torch import fx

from qatkit.graph.nodes import facts, module_of, op_class
from qatkit.graph.quantizers import is_quantizer, quantizer_after, quantizer_of
from qatkit.graph.scales.moves import MOVES, Move, OneUnit, Rule, Scales
from qatkit.graph.scales.shared import settle_together, shared_groups
from qatkit.graph.scales.shifts import ShiftBounds
from qatkit.quant.fake_quantize import FakeQuantize

# Whether a scale is settled; None if that is known only once the scales have values.
Known = bool | None


def align(graph_module: fx.GraphModule) -> None:
    """Sets the scales of all activations from their observers' ranges, then aligns them.

    The result depends only on the ranges, so that a second call changes nothing.
    """
    Alignment(graph_module)()


class Alignment:
    """The relations between the scales of one graph, found once; each call sets and aligns the scales.

    It refers to the quantizers that the graph had when the object was created. A call copies no value to the host,
    except for the first call after the quantizers have moved to another device.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self._quantizers = _unique(
            cast(FakeQuantize, module_of(n)) for n in graph_module.graph.nodes if is_quantizer(n)
        )
        self._shared = shared_groups(graph_module)
        led = {id(q) for group in self._shared for q in group[1:]}
        self._quantizers = [q for q in self._quantizers if id(q) not in led]
        leading = {id(group[0]) for group in self._shared}
        self._moving = [q for q in self._quantizers if q.movable or id(q) in leading]
        self._graph_module = graph_module
        if self._moving:
            self._plan(self._moving[0].scale.device)

    def _plan(self, device: torch.device) -> None:
        graph_module = self._graph_module
        position = {id(q): at for at, q in enumerate(self._quantizers)}
        position |= {id(q): position[id(group[0])] for group in self._shared for q in group}
        self._at = torch.tensor([position[id(q)] for q in self._moving], device=device)
        self._settled = torch.ones(len(self._quantizers), dtype=torch.bool, device=device)
        self._settled[self._at] = False
        self._least = torch.tensor(_least_scales(graph_module, position), dtype=torch.float64, device=device)
        known: list[Known] = [q not in self._moving for q in self._quantizers]
        groups = [[position[id(q)] for q in group] for group in _groups(graph_module)]
        groups = [list(dict.fromkeys(group)) for group in groups]
        for at in (at for group in groups for at in group):
            known[at] = known[at] or None
        self._moves: list[Move] = [OneUnit(groups, device)] if groups else []
        for alike in _at_once(_rules(graph_module, position, known)):
            self._moves.append(MOVES[alike[0].kind](alike, self._quantizers, device))
        backend = graph_module.meta.get("backend")
        if backend is not None and backend.shifts is not None:
            self._moves.append(ShiftBounds(graph_module, position, device))

    @torch.no_grad()
    def __call__(self) -> None:
        if not self._moving:
            return
        if self._at.device != self._moving[0].scale.device:
            self._plan(self._moving[0].scale.device)
        for quantizer in self._moving:
            quantizer.settle()
        for group in self._shared:
            settle_together(group)
        values = torch.stack([quantizer.scale for quantizer in self._quantizers]).double()
        values = torch.maximum(values, self._least)
        scales = Scales(values, self._settled.clone())
        for move in self._moves:
            move(scales)
        torch._foreach_copy_([q.scale for q in self._moving], list(values[self._at].float().unbind()))
        for first, *others in self._shared:
            torch._foreach_copy_([q.scale for q in others], [first.scale] * len(others))
            torch._foreach_copy_([q.zero_point for q in others], [first.zero_point] * len(others))


def _least_scales(graph_module: fx.GraphModule, position: dict[int, int]) -> list[float]:
    """Returns the lower bound of each quantizer's scale; 0 where there is none.

    Before a HardSigmoid with power-of-two scales, the bound is two steps of the result. With smaller scales, x/6 can
    be at a tie, where the rounding error of 1/6 decides. At the bound, a step of the result covers three of the input.
    """
    least = [0.0] * (max(position.values()) + 1)
    for node in graph_module.graph.nodes:
        before = quantizer_of(node.args[0]) if facts(node).align == "hardsigmoid" else None
        if before is not None:
            quantizer = cast(FakeQuantize, module_of(before))
            if quantizer.spec.powers_of_two and not quantizer.spec.wide:
                least[position[id(quantizer)]] = 2.0 ** (-6 if quantizer.spec.symmetric else -7)
    return least


def _rules(graph_module: fx.GraphModule, position: dict[int, int], known: list[Known]) -> list[Rule]:
    """Returns the rules of the operators in graph order; updates `known` to the state after the last rule."""
    rules = []
    for node in graph_module.graph.nodes:
        kind = facts(node).align
        around = _before(node) if kind == "hardsigmoid" else _around(node) if kind else None
        if around is None or (kind == "product" and len(around) != 3):
            continue
        *inputs, after = (position[id(q)] for q in around)
        if kind == "sum":
            inputs = list(dict.fromkeys(inputs))
        if kind != "hardsigmoid" and after in inputs:
            continue  # input and output share a scale, so none can be moved
        count = _window(node) if kind == "mean" else 1
        turns = known[after] is not True, known[after] is not False and known[inputs[0]] is not True
        rules.append(Rule(kind, node, tuple(inputs), after, count, turns))
        for at in (*inputs, after):
            known[at] = True
    return rules


def _at_once(rules: Iterable[Rule]) -> list[list[Rule]]:
    """Groups similar rules without a common quantizer; rules with a common quantizer stay in graph order."""
    last: dict[int, int] = {}
    found: dict[tuple[int, Hashable], list[Rule]] = {}
    for rule in rules:
        around = (*rule.inputs, rule.after)
        level = 1 + max(last.get(at, 0) for at in around)
        last.update(dict.fromkeys(around, level))
        found.setdefault((level, rule.likeness), []).append(rule)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


def _unique(quantizers: Iterable[FakeQuantize]) -> list[FakeQuantize]:
    return list({id(q): q for q in quantizers}.values())


def _around(node: fx.Node) -> list[FakeQuantize] | None:
    """Returns the quantizers of all inputs and of the output; None if one of them can't be aligned.

    Quantizers of 16 bits can't be aligned: their operators compute in float in every runtime, and ties are so close
    to each other that no scale keeps a float sum away from them.
    """
    found = [*map(quantizer_of, node.all_input_nodes), quantizer_after(node)]
    return _with_integers([None if n is None else cast(FakeQuantize, module_of(n)) for n in found])


def _before(node: fx.Node) -> list[FakeQuantize] | None:
    """Returns the quantizer of the input twice, or None if it can't be aligned.

    The second one replaces the quantizer of the output, whose range is fixed.
    """
    before = quantizer_of(node.args[0])
    return _with_integers([None if before is None else cast(FakeQuantize, module_of(before))] * 2)


def _with_integers(found: list[FakeQuantize | None]) -> list[FakeQuantize] | None:
    """Returns the quantizers; None if one can't be aligned.

    A quantizer can't be aligned if it is missing, if it has a number format (without uniform steps) or 16 bits, or if
    its type of scale allows only some values. With powers of two, sums are exact and ties are the same everywhere.
    """
    whole = [one for one in found if one is not None and one.spec.form is None]
    known = [one for one in whole if not one.spec.wide and one.spec.any_scale]
    return known if len(known) == len(found) else None


def _groups(graph_module: fx.GraphModule) -> list[list[FakeQuantize]]:
    """Returns groups of quantizers that meet in sums, directly or through other sums; each is in one group."""
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


def _window(node: fx.Node) -> int:
    """Returns the number of values that an average pool averages."""
    sizes = node.all_input_nodes[0].meta["value"].shape[2:]
    if op_class(node) == "global_pool":
        return math.prod(sizes)
    if node.op == "call_module":
        size: Any = module_of(node).kernel_size
    else:
        size = node.args[1] if len(node.args) > 1 else node.kwargs["kernel_size"]
    return math.prod(size) if isinstance(size, (tuple, list)) else int(size) ** len(sizes)
