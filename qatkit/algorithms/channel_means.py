"""Finds the channels that `ShiftChannels` shifts, and moves their means into the biases of their readers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from qatkit.algorithms.batches import first_images
from qatkit.algorithms.scalable import by_channel, input_factors
from qatkit.graph.channels import Followed, Reader, follow_shifts
from qatkit.graph.nodes import facts, module_of, op_class, parameter_reads
from qatkit.graph.pass_result import PassResult
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.quantizers import quantizer_of
from qatkit.graph.signature import Example
from qatkit.quant.computed_weights import Computed


@dataclass(frozen=True, eq=False)
class ShiftableOperator:
    """An operator whose output channels can be shifted by constants.

    Attributes:
        bias: its bias [channels], a parameter that nothing else reads.
        followed: the operators that its channels reach.
    """

    bias: Tensor
    followed: Followed

    @torch.no_grad()
    def subtract(self, means: Tensor) -> None:
        """Subtracts `means` [channels], float64, from the channels; readers compensate in their biases."""
        self.bias.copy_(self.bias.double() - means.to(self.bias.device))
        for reader in self.followed.readers:
            operator = module_of(reader.node)
            weight, bias = cast(Tensor, operator.weight), cast(Tensor, operator.bias)
            own = by_channel(means, reader.channels, 0).to(weight.device)
            bias.copy_(bias.double() + (weight.double() * input_factors(operator, own)).flatten(1).sum(1))


def shift(images: int, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
    """Subtracts the mean of every channel that can be shifted: implements `ShiftChannels.__call__`."""
    found = shiftable(graph_module)
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        watch = _Means(graph_module, found)
        for batch in first_images(graph_module, inputs, images):
            watch.run(*batch)
        for source in found:
            source.subtract(watch.means(source))
    return PassResult(graph_module, len(found))


def shiftable(graph_module: fx.GraphModule) -> list[ShiftableOperator]:
    """Returns the operators that have shiftable channels and a reader whose input is quantized, in graph order."""
    reads = parameter_reads(graph_module.graph)
    found = list[ShiftableOperator]()
    for node in graph_module.graph.nodes:
        given = _given(node, reads)
        if given is None:
            continue
        axis, bias = given
        followed = follow_shifts(node, axis, reads)
        quantized = any(quantizer_of(reader.node.args[0]) is not None for reader in followed.readers)
        if quantized and followed.free.any():
            found.append(ShiftableOperator(bias, followed))
    return found


def _given(node: fx.Node, reads: Mapping[int, int]) -> tuple[int, Tensor] | None:
    """Returns the axis of the channels, counted from the end, and their bias; None without a bias to change."""
    module = module_of(node) if node.op == "call_module" else None
    bias = getattr(module, "bias", None)
    kind, rank = op_class(node), cast(Tensor, node.meta["value"]).ndim if module is not None else 0
    if not isinstance(bias, nn.Parameter) or bias.ndim != 1 or reads[id(bias)] > 1:
        return None
    if isinstance(module, Computed) or getattr(module, "bn", None) is not None:
        return None
    if kind == "batch_norm" or isinstance(module, nn.GroupNorm):
        return 1 - rank, bias
    if kind in ("linear", "layer_norm"):
        return -1, bias
    return (1 - cast(Tensor, cast(nn.Module, module).weight).ndim, bias) if facts(node).weighted else None


class _Means(fx.Interpreter):
    """An interpreter that sums the readers' inputs by channel of the source."""

    def __init__(self, graph_module: fx.GraphModule, found: Iterable[ShiftableOperator]) -> None:
        super().__init__(graph_module)
        self._at = defaultdict[fx.Node, list[tuple[ShiftableOperator, Reader]]](list)
        self._sums, self._counts = dict[ShiftableOperator, Tensor](), dict[ShiftableOperator, Tensor]()
        for source in found:
            self._sums[source] = torch.zeros(len(source.followed.free), dtype=torch.float64)
            self._counts[source] = torch.zeros(len(source.followed.free), dtype=torch.float64)
            for reader in source.followed.readers:
                self._at[reader.node].append((source, reader))

    def run_node(self, n: fx.Node) -> Any:
        for source, reader in self._at[n]:
            x = self.env[cast(fx.Node, n.args[0])]
            axis = -1 if op_class(n) == "linear" else 1 - cast(Tensor, module_of(n).weight).ndim
            rows = x.movedim(axis, 0).flatten(1)
            known = reader.channels >= 0
            at = reader.channels[known]
            self._sums[source].index_add_(0, at, rows.double().sum(1).cpu()[known])
            self._counts[source].index_add_(0, at, torch.full(at.shape, float(rows.shape[1])).double())
        return super().run_node(n)

    def means(self, source: ShiftableOperator) -> Tensor:
        """Returns the means [channels], float64; 0 for channels that are not shifted."""
        means = self._sums[source] / self._counts[source].clamp(min=1)
        return torch.where(source.followed.free, means, 0.0)
