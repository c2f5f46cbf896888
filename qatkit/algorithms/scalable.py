"""Divides output channels of operators by positive factors at no cost, and multiplies their readers' weights.

These parameters absorb the division:

LayerNorm, GroupNorm, RMSNorm, BatchNorm     weight and bias
Conv, Linear                                 weight and bias, or those of the BatchNorm that follows
a product with a parameter                   the parameter, such as in a norm that consists of simple operators
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from qatkit.graph.channels import Followed, Reader, follow
from qatkit.graph.node_arguments import parameter_of, shape_of
from qatkit.graph.nodes import facts, module_of, op_class, parameter_reads, site
from qatkit.quant.computed_weights import Computed
from qatkit.quant.granularity import along
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize


@dataclass(frozen=True, eq=False)
class ScalableOperator:
    """An operator whose output channels can be scaled.

    Attributes:
        node: the operator.
        parameters: the parameters that multiply and shift its channels, [channels, ...]; for a product with a
            parameter, this parameter in its own shape, with one axis of channels.
        followed: the operators that its channels reach.
    """

    node: fx.Node
    parameters: tuple[Tensor, ...]
    followed: Followed

    @torch.no_grad()
    def divide(self, s: Tensor) -> None:
        """Divides the output channels by `s` [channels], float64."""
        for parameter in self.parameters:
            axis = _row_axis(parameter) if op_class(self.node) == "mul" else 0
            parameter.copy_(parameter.double() / along(s.to(parameter.device), axis, parameter.ndim))
        for parameter, channels in self.followed.added:
            parameter.copy_(parameter.double() / by_channel(s, channels).to(parameter.device))


def sources(graph_module: fx.GraphModule) -> tuple[list[ScalableOperator], list[tuple[str, str]]]:
    """Returns the operators with channels that can be scaled, in graph order, and (site, reason) of the others.

    Operators whose channels only reach an output, or no Conv or Linear, are in neither list.

    Args:
        graph_module: the prepared graph.
    """
    reads = parameter_reads(graph_module.graph)
    found, skipped = list[ScalableOperator](), list[tuple[str, str]]()
    for node in graph_module.graph.nodes:
        given = _given(node)
        if given is None:
            continue
        axis, parameters = given
        reason = _why_not(node, parameters, reads)
        followed = None if reason else follow(node, axis, reads)
        if followed is not None and followed.free.any():
            found.append(ScalableOperator(node, parameters, followed))
        elif reason or (followed is not None and followed.why):
            skipped.append((site(node), reason or cast(Followed, followed).why))
    return found, skipped


def chosen_sources(
    graph_module: fx.GraphModule, takes: Callable[[Reader], bool], verb: str
) -> tuple[list[ScalableOperator], list[tuple[str, str]]]:
    """Returns the sources to scale, in graph order, and (site, "not VERB: why") of those that cannot be scaled.

    Args:
        graph_module: the prepared graph.
        takes: a function that returns whether a reader benefits from factors; a source needs one such reader.
        verb: the participle for the reasons, such as "smoothed".
    """
    found, skipped = sources(graph_module)
    chosen = list[ScalableOperator]()
    for source in _nearest(found):
        own = weight_quantizer(source.node)
        if own is not None and not own.spec.granularity.separates(0):
            skipped.append((site(source.node), "its weight has one scale, and factors would widen its range"))
        elif any(map(takes, source.followed.readers)):
            chosen.append(source)
    return chosen, [(where, f"not {verb}: {reason}") for where, reason in skipped]


def weight_quantizer(node: fx.Node) -> WeightFakeQuantize | None:
    """Returns the quantizer of the weight of a Conv or Linear; None for float weights and other nodes."""
    module = module_of(node) if node.op == "call_module" else None
    return module.weight_fake_quant if isinstance(module, QATOperator) else None


def _nearest(found: list[ScalableOperator]) -> list[ScalableOperator]:
    """Removes operators if a later one scales the same inputs of a reader.

    An example is a Linear before a product with a parameter: the product is scaled.
    """
    taken: dict[fx.Node, Tensor] = {}
    kept = list[ScalableOperator]()
    for source in reversed(found):
        read = {r.node: by_channel(source.followed.free, r.channels, 0) for r in source.followed.readers}
        read = {node: inputs for node, inputs in read.items() if inputs.any()}
        if not any((taken[node] & inputs).any() for node, inputs in read.items() if node in taken):
            kept.append(source)
            for node, inputs in read.items():
                taken[node] = taken.get(node, torch.zeros_like(inputs)) | inputs
    return kept[::-1]


def by_channel(s: Tensor, channels: Tensor, other: float = 1) -> Tensor:
    """Returns the factors of the source's channels with the indices `channels`; `other` where an index is -1."""
    return torch.cat([s, s.new_full((1,), other)])[channels.to(s.device)]


def input_factors(operator: nn.Module, s: Tensor) -> Tensor:
    """Returns the factors `s` [inputs] in a shape that broadcasts to the weight of a Conv (also grouped) or Linear."""
    weight, groups = cast(Tensor, operator.weight), int(getattr(operator, "groups", 1))
    rows = s.view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1).reshape(weight.shape[:2])
    return rows.view(*rows.shape, *[1] * (weight.ndim - 2))


@torch.no_grad()
def multiply(reader: Reader, s: Tensor) -> None:
    """Multiplies the input channels of a reader by the factors [channels] of its source."""
    operator = module_of(reader.node)
    weight = cast(Tensor, operator.weight)
    own = by_channel(s, reader.channels).to(weight.device)
    weight.copy_(weight.double() * input_factors(operator, own))


def _given(node: fx.Node) -> tuple[int, tuple[Tensor, ...]] | None:
    """Returns the axis of the channels, counted from the end, and their parameters.

    There are no parameters for a norm without weight and bias. Returns None for operators of other kinds.
    """
    kind = op_class(node)
    if node.op == "call_module":
        module = module_of(node)
        if facts(node).weighted:
            axis = -1 if kind == "linear" else 1 - cast(Tensor, module.weight).ndim
            return axis, _own(getattr(module, "bn", None) or module)
        rank = len(shape_of(node) or ())
        if kind == "batch_norm" or isinstance(module, nn.GroupNorm):
            return 1 - rank, _own(module)
        if kind == "layer_norm" or isinstance(module, nn.RMSNorm):
            return -1, _own(module)
    elif kind == "layer_norm":
        given = (*node.args[2:4], node.kwargs.get("weight"), node.kwargs.get("bias"))
        return -1, tuple(p for p in map(parameter_of, given) if p is not None)
    elif kind == "mul":
        rows = [p for p in map(parameter_of, node.args) if isinstance(p, nn.Parameter)]
        if len(rows) == 1 and _is_row(rows[0]):
            return _row_axis(rows[0]) - rows[0].ndim, (rows[0],)
    return None


def _own(module: nn.Module) -> tuple[Tensor, ...]:
    if isinstance(module, Computed):
        return (module.weight, module.bias)
    return tuple(
        p for p in (module._parameters.get("weight"), module._parameters.get("bias")) if p is not None
    )


def _is_row(parameter: Tensor) -> bool:
    """Returns whether all values lie along one axis."""
    return parameter.numel() > 1 and parameter.numel() == max(parameter.shape)


def _row_axis(parameter: Tensor) -> int:
    return max(range(parameter.ndim), key=lambda d: parameter.shape[d])


def _why_not(node: fx.Node, parameters: tuple[Tensor, ...], reads: Mapping[int, int]) -> str:
    if node.op == "call_module" and isinstance(module_of(node), Computed):
        return f"the weight or bias of {site(node)} is computed from other parameters"
    if not parameters:
        return f"{site(node)} has no weight"
    if any(reads[id(parameter)] > 1 for parameter in parameters):
        return f"{site(node)} is called more than once, or something else reads its weight or bias"
    if not facts(node).weighted and not all(map(_is_row, parameters)):
        return f"{site(node)} has a separate weight for every position"
    return ""
