"""Moves for the alignment of scales (`qatkit.graph.scales.align`); each one moves scales of many operators at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from qatkit.graph.nodes import module_of
from qatkit.graph.quantizers import quantizer_of
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.numerics import odd_fraction

# The largest scale of a group of sums, in units of the group. The unit is so fine that a scale moves by less than
# 2/2047 of the largest scale, and so coarse that float32 resolves half a unit of a sum (1/4094 of a step).
_UNITS = 2047
_PRIME = 1021
_LARGEST_MOVE = 1.03
# The fewest units a scale may have: a move to the next odd number is at most 2 units, 3 % of it.
_FINEST = 67
# The least distance of all results from a tie, in steps, and the factors that are tried on a scale to reach it.
_MARGIN, _TRIED = 1e-3, [1 + i / 4096 for i in range(41)]


class Scales(NamedTuple):
    """All scales of a graph while they are aligned.

    Attributes:
        values: the scales [quantizers], float64 with values that float32 can represent.
        settled: whether each scale is final, [quantizers] of booleans.
    """

    values: Tensor
    settled: Tensor

    def set(self, at: Tensor, to: Tensor, when: Tensor) -> None:
        """Sets the scales at positions `at` to `to` where `when` is true; `when` is broadcast to their shape.

        A position that occurs twice has to get the same value twice.
        """
        self.values[at] = torch.where(when, to.float().double(), self.values[at])

    def move(self, at: Tensor, to: Tensor, when: Tensor) -> None:
        """Moves scales up, as `set` does, except where a scale would grow by more than the factor `_LARGEST_MOVE`.

        A range that is much smaller than its neighbours would otherwise lose much of its resolution.
        """
        self.set(at, to, (to > 0) & (to <= _LARGEST_MOVE * self.values[at]) & when)

    def settle(self, *positions: Tensor) -> None:
        for at in positions:
            self.settled.index_fill_(
                0, at.reshape(-1), True
            )  # index assignment would copy True from the host


Move = Callable[[Scales], None]


@dataclass(frozen=True)
class Rule:
    """The alignment rule of one operator for the scales around it.

    Attributes:
        kind: one of `qatkit.graph.operators.ALIGNMENTS`.
        node: the node of the operator.
        inputs, after: positions of the quantizers of its inputs and of its output. For a HardSigmoid, `after` is the
            position of its input's quantizer.
        count: the number of values that an average pool averages, else 1.
        turns: two flags for the kind "table" (unary operators): whether the scale after the operator may have to
            move, and whether the one before it may.
    """

    kind: str
    node: fx.Node
    inputs: tuple[int, ...]
    after: int
    count: int = 1
    turns: tuple[bool, bool] = (True, True)

    @property
    def likeness(self) -> Hashable:
        """A key that is equal for rules that move scales by the same operations."""
        if self.kind == "table":
            return self.kind, self.turns, _function(self.node)
        return self.kind, len(self.inputs), len(set(self.inputs))


def _odd(steps: Tensor) -> Tensor:
    """Returns the smallest odd numbers that are not below `steps`, apart from rounding errors."""
    return torch.ceil((steps - 1) / 2 - 1e-6) * 2 + 1


class OneUnit:
    """Moves every scale of a group up to the next odd multiple of a common unit.

    A group stays unchanged if one of its scales is settled, or if its scales are too far apart.
    """

    def __init__(self, groups: Sequence[Sequence[int]], device: torch.device) -> None:
        longest = max(map(len, groups))
        rows = [[*group, *[group[0]] * (longest - len(group))] for group in groups]
        self._at = torch.tensor(rows, device=device)

    def __call__(self, scales: Scales) -> None:
        given, settled = scales.values[self._at], scales.settled[self._at]
        low, high = given.aminmax(dim=1, keepdim=True)
        unit = high / _UNITS
        fits = low * _UNITS >= _FINEST * high
        scales.move(self._at, unit * _odd(given / unit), fits & ~settled.any(1, keepdim=True))
        scales.settled[self._at] = settled | fits


class _Around:
    """Base class of moves that apply several similar rules at once.

    Attributes:
        inputs: positions of the quantizers of the inputs, [rules, inputs].
        after: positions of the quantizers of the outputs, [rules].
    """

    def __init__(
        self, rules: Sequence[Rule], quantizers: Sequence[FakeQuantize], device: torch.device
    ) -> None:
        self.inputs = torch.tensor([rule.inputs for rule in rules], device=device)
        self.after = torch.tensor([rule.after for rule in rules], device=device)


class _Sums(_Around):
    """Moves the scales of each sum to multiples of a unit that is a fraction of one input's scale.

    This input is the one whose scale is settled, or else the one with the largest scale. A sum with a settled output
    or several settled inputs stays unchanged.
    """

    def __call__(self, scales: Scales) -> None:
        given, target = scales.values[self.inputs], scales.values[self.after]
        known = scales.settled[self.inputs]
        chosen = torch.where(known, torch.inf, given).argmax(1, keepdim=True)
        anchor = given.gather(1, chosen).squeeze(1)
        when = (known.sum(1) <= 1) & ~scales.settled[self.after]
        unit = anchor / torch.round(_UNITS * anchor / target).clamp(min=1)
        scales.move(self.after, _odd(target / unit) * unit, when)
        unit, others = unit[:, None], torch.ones_like(known).scatter(1, chosen, False)
        scales.move(self.inputs, torch.ceil(given / unit - 1e-6) * unit, when[:, None] & others)
        scales.settle(self.inputs, self.after)


class _Fractions(_Around):
    """Moves one scale so that (product of the inputs' scales)/(count·after) is a fraction with an odd denominator.

    The output's scale (`after`) moves; if it is settled, an input's scale moves instead. `odd_fraction` says why
    the denominator is odd.
    """

    def __init__(
        self, rules: Sequence[Rule], quantizers: Sequence[FakeQuantize], device: torch.device
    ) -> None:
        super().__init__(rules, quantizers, device)
        self._count = torch.tensor([rule.count for rule in rules], dtype=torch.float64, device=device)
        square = len(set(rules[0].inputs)) < len(rules[0].inputs)  # both factors have the same scale
        self._movable = () if square else self.inputs.unbind(1)

    def __call__(self, scales: Scales) -> None:
        product = scales.values[self.inputs].prod(1)
        wanted = product / (self._count * scales.values[self.after])
        left = scales.settled[self.after]
        scales.set(self.after, product / (self._count * odd_fraction(wanted, up=False)), ~left)
        for at in self._movable:
            when = left & ~scales.settled[at]
            scales.set(at, scales.values[at] * (odd_fraction(wanted, up=True) / wanted), when)
            left = left & ~when
        scales.settle(self.inputs, self.after)


class _HardSigmoids(_Around):
    """Moves the scale before each HardSigmoid up to a multiple of its unit (6/255)/1021."""

    def __init__(
        self, rules: Sequence[Rule], quantizers: Sequence[FakeQuantize], device: torch.device
    ) -> None:
        super().__init__(rules, quantizers, device)
        specs = [quantizers[rule.after].spec for rule in rules]
        units = [6.0 / (spec.quant_max - spec.quant_min) / _PRIME for spec in specs]
        self._unit = torch.tensor(units, dtype=torch.float64, device=device)

    def __call__(self, scales: Scales) -> None:
        moved = torch.ceil(scales.values[self.after] / self._unit - 1e-6) * self._unit
        scales.move(self.after, moved, ~scales.settled[self.after])
        scales.settle(self.after)


class _Tables(_Around):
    """Moves one scale of a unary operator, by at most 1 %, until no result is close to a tie.

    If no such scale is found, the one whose results stay farthest from ties is chosen.
    """

    def __init__(
        self, rules: Sequence[Rule], quantizers: Sequence[FakeQuantize], device: torch.device
    ) -> None:
        super().__init__(rules, quantizers, device)
        self._before = self.inputs[:, 0]
        self._quantizers = [quantizers[rule.inputs[0]] for rule in rules]
        self._node, self._turns = rules[0].node, rules[0].turns
        self._tried = torch.tensor(_TRIED, dtype=torch.float64, device=device)
        ends = [quantizer.spec.type_range for quantizer in self._quantizers]
        steps = [list(range(low, high + 1)) for low, high in ends]
        self._steps = torch.tensor(steps, dtype=torch.float64, device=device)

    def __call__(self, scales: Scales) -> None:
        settled = scales.settled[self.after]
        turns = (self.after, ~settled), (self._before, settled & ~scales.settled[self._before])
        zero_points = torch.stack([quantizer.zero_point for quantizer in self._quantizers])
        for (at, when), may in zip(turns, self._turns, strict=True):
            if may:
                self._keep_margin(scales, at, when, self._steps - zero_points[:, None])
        scales.settle(self._before, self.after)

    def _keep_margin(self, scales: Scales, at: Tensor, when: Tensor, q: Tensor) -> None:
        before, after = (scales.values[one][:, None] for one in (self._before, self.after))
        candidates = scales.values[at][:, None] * self._tried
        tried = candidates.float().double()
        margins = self._nearest_ties(q, *((before, tried) if at is self.after else (tried, after)))
        kept = margins >= _MARGIN
        index = torch.where(kept.any(1), kept.int().argmax(1), margins.argmax(1))
        scales.set(at, candidates.gather(1, index[:, None]).squeeze(1), when)

    def _nearest_ties(self, q: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Returns the smallest distance of a result from a tie k + 1/2, in steps of the output.

        The result of 0 is excluded, since no scale changes its distance.

        Args:
            q: integers minus their zero point, [rules, integers].
            before, after: scales of the input and of the output: [rules, candidates] for the scale that moves,
                [rules, 1] for the other.

        Returns:
            [rules, candidates]
        """
        q = q[:, None]
        steps = _apply(self._node, (q * before[..., None]).float()).double() / after[..., None]
        return (steps - steps.floor() - 0.5).abs().masked_fill(q == 0, torch.inf).amin(2)


def _apply(node: fx.Node, x: Tensor) -> Tensor:
    """Applies the unary operator of `node` to `x`."""
    result: Tensor = (
        module_of(node)(x)
        if node.op == "call_module"
        else getattr(x, str(node.target))(*node.args[1:], **node.kwargs)
        if node.op == "call_method"
        else cast(Any, node.target)(x, *node.args[1:], **node.kwargs)
    )
    return result


def _function(node: fx.Node) -> Hashable:
    """Returns a key that is equal for unary operators that can be applied at once: same function, same input type."""
    before = cast(FakeQuantize, module_of(cast(fx.Node, quantizer_of(node.all_input_nodes[0]))))
    if node.op != "call_module":
        return node.op, node.target, str(node.args[1:]), str(node.kwargs), before.spec.type_range
    module = module_of(node)
    stateless = not module.state_dict() and not list(module.children())
    return type(module) if stateless else id(module), module.extra_repr(), before.spec.type_range


MOVES: dict[str, type[_Sums | _Fractions | _HardSigmoids | _Tables]] = {
    "sum": _Sums,
    "product": _Fractions,
    "mean": _Fractions,
    "hardsigmoid": _HardSigmoids,
    "table": _Tables,
}
