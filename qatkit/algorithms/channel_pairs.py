"""Pairs of operators whose channels `Equalize` gives equal ranges: the search, the factors, their application."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.algorithms.scalable import input_factors
from qatkit.graph.nodes import facts, module_of, op_class, parameter_reads, site
from qatkit.graph.pass_result import PassResult
from qatkit.graph.signature import Example
from qatkit.graph.trace import propagate, tidy
from qatkit.quant.computed_weights import Computed
from qatkit.quant.granularity import along

if TYPE_CHECKING:
    from qatkit.algorithms.equalize import Equalize

# Pairs (first, second, whether a flatten is between them) in which the output channels of the first operator
# are the input channels of the second.
_SAME_AXIS = frozenset({("conv", "conv", False), ("linear", "linear", False), ("conv", "linear", True)})
_FLATTENS = frozenset({"flatten", "reshape", "view"})
# A channel with a range below this share of the largest is dead: after equalization only its bias would
# remain.
_DEAD = 1e-5


@dataclass(frozen=True)
class Pair:
    """A pair of Convs or Linears whose channels can be rescaled.

    The operators between the two are homogeneous (f(s·x) = s·f(x) for s > 0), flattens, or ReLU6 that become
    ReLU.

    Attributes:
        first, second: the calls of the two operators.
        repeat: number of inputs of `second` for each channel of `first`, more than 1 after a flatten.
        clips: the calls of ReLU6 between the two.
    """

    first: fx.Node
    second: fx.Node
    repeat: int
    clips: tuple[fx.Node, ...]


def equalize(settings: Equalize, graph_module: fx.GraphModule, inputs: Example) -> PassResult:
    """Gives the channels of every pair equal ranges: implements `Equalize.__call__`."""
    propagate(graph_module, inputs)
    result, reads = PassResult(graph_module), parameter_reads(graph_module.graph)
    pairs: list[Pair] = []
    for node in graph_module.graph.nodes:
        found = _pair(node, settings.relu6, reads) if facts(node).weighted else None
        if isinstance(found, Pair):
            pairs.append(found)
        elif found:
            result.skipped.append((site(node), f"not equalized: {found}"))
    factors = _solve(settings, pairs)
    for pair in pairs:
        _apply(pair, factors[pair])
        for node in pair.clips:
            node.op, node.target, node.args, node.kwargs = "call_function", F.relu, node.args[:1], {}
    result.changed = len(pairs)
    tidy(graph_module)
    return result


def _solve(settings: Equalize, pairs: list[Pair]) -> dict[Pair, Tensor]:
    """Returns the factors s of every pair, [channels of `first`], float64."""
    largest = {node: magnitudes(module_of(node)) for pair in pairs for node in (pair.first, pair.second)}
    total = {pair: torch.ones_like(output_ranges(largest[pair.first])) for pair in pairs}
    for _ in range(settings.rounds):
        moved = 0.0
        for pair in pairs:
            ranges = input_ranges(largest[pair.second]).view(-1, pair.repeat).amax(1)
            s = factor(output_ranges(largest[pair.first]), ranges)
            _scale(largest, pair, s)
            total[pair] *= s
            moved = max(moved, float((s - 1).abs().max()))
        if moved < settings.tolerance:
            break
    return total


def magnitudes(operator: nn.Module) -> Tensor:
    """Returns the largest |weight| over the kernel, [groups, outputs of a group, inputs of a group], float64."""
    weight = cast(Tensor, operator.weight).detach().double().abs()
    groups = _groups(operator)
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).amax(3)


def output_ranges(largest: Tensor) -> Tensor:
    """Returns the largest weight of each output, [outputs], from the result of `magnitudes`."""
    return largest.amax(2).flatten()


def input_ranges(largest: Tensor) -> Tensor:
    """Returns the largest weight of each input, [inputs], from the result of `magnitudes`."""
    return largest.amax(1).flatten()


def factor(first: Tensor, second: Tensor) -> Tensor:
    """Returns s [channels], with which first / s = second · s; 1 for a dead channel."""
    alive = (first > _DEAD * first.max()) & (second > _DEAD * second.max())
    return torch.where(alive, (first / second.clamp(min=1e-300)).sqrt(), 1.0)


def _scale(largest: dict[fx.Node, Tensor], pair: Pair, s: Tensor) -> None:
    first, second = largest[pair.first], largest[pair.second]
    largest[pair.first] = first / s.view(first.shape[0], -1, 1)
    largest[pair.second] = second * s.repeat_interleave(pair.repeat).view(second.shape[0], 1, -1)


@torch.no_grad()
def _apply(pair: Pair, s: Tensor) -> None:
    first, second = module_of(pair.first), module_of(pair.second)
    for parameter in (first.weight, first.bias):
        if parameter is not None:
            values = cast(Tensor, parameter)
            values.copy_(values.double() / along(s.to(values.device), 0, values.ndim))
    weight = cast(Tensor, second.weight)
    weight.copy_(weight.double() * input_factors(second, s.to(weight.device).repeat_interleave(pair.repeat)))


def _pair(first: fx.Node, relu6: str, reads: Mapping[int, int]) -> Pair | str:
    """Returns the pair that begins with `first`, or the reason why there is none ("": not reported)."""
    between = list[fx.Node]()
    node = first
    while True:
        if len(node.users) != 1:
            return f"{len(node.users)} operators read {site(node)}"
        node = next(iter(node.users))
        if facts(node).weighted or node.op == "output":
            break
        if not _flattens(node):
            reason = _not_homogeneous(node, first, relu6)
            if reason:
                return reason
        between.append(node)
    if node.op == "output":
        return ""
    if (op_class(first), op_class(node), any(map(_flattens, between))) not in _SAME_AXIS:
        return f"{site(node)} reads another axis"
    channels = cast(Tensor, module_of(first).weight).shape[0]
    inputs = cast(Tensor, module_of(node).weight).shape[1] * _groups(module_of(node))
    clips = tuple(n for n in between if op_class(n) == "relu6")
    return _why_not(first, reads) or _why_not(node, reads) or Pair(first, node, inputs // channels, clips)


def _not_homogeneous(node: fx.Node, first: fx.Node, relu6: str) -> str:
    kind = op_class(node)
    if kind == "relu6":
        advice = "a ReLU6 has one bound for all channels (algorithm.equalize.relu6=relu turns it into a ReLU)"
        return advice if relu6 == "keep" else ""
    scales = facts(node)  # a pooling after a Linear would pool its channels
    if scales.homogeneous and not (scales.pools and op_class(first) == "linear"):
        return ""
    return f"{site(node)} ({kind}) does not scale channel by channel"


def _groups(operator: nn.Module) -> int:
    return int(getattr(operator, "groups", 1))


def _why_not(node: fx.Node, reads: Mapping[int, int]) -> str:
    module = module_of(node)
    if isinstance(module, Computed):
        return f"the weight or bias of {site(node)} is computed from other parameters"
    if getattr(module, "bn", None) is not None:
        return f"the BatchNorm of {site(node)} is not folded (schedule.batch_norm=fold folds it)"
    if any(reads[id(parameter)] > 1 for parameter in module.parameters()):
        return f"{site(node)} is called more than once, or something else reads its weight or bias"
    return ""


def _flattens(node: fx.Node) -> bool:
    """Returns whether a node turns [N, C, ...] into [N, C·...], in that order."""
    name = type(module_of(node)).__name__ if node.op == "call_module" else node.target
    if str(getattr(name, "__name__", name)).lower() not in _FLATTENS:
        return False
    shape, new = tuple(node.all_input_nodes[0].meta["value"].shape), tuple(node.meta["value"].shape)
    return len(shape) > 2 and len(new) == 2 and shape[0] == new[0]
