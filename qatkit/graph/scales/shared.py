"""Finds tensors that share one scale: the inputs and outputs of the operator classes in `Backend.aligned`.

This is for hardware that moves bytes through a Concat, or sums them in a pool, without requantizing. Tensors that meet
directly or through other such operators are one group, with a range that covers all of them (or, for power-of-two
scales, the range with the least error: `choose_shared_ranges`). Operators that only select or move values share their
input's quantizer anyway (`qatkit.graph.quantizers.quantizer_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from qatkit.graph.nodes import fused_activation, module_of, op_class
from qatkit.graph.quantizers import quantizer_after, quantizer_of
from qatkit.quant.backends import Backend
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import HistogramObserver
from qatkit.quant.observers.range_methods import points_of
from qatkit.quant.scale_types import range_of

Group = list[FakeQuantize]
# If scales need not be powers of two, pools requantize like other operators, and a scale of their own is finer
# (decision 84).
_POOLS = frozenset({"avg_pool", "global_pool"})


def shared_groups(graph_module: fx.GraphModule) -> list[Group]:
    """Returns the groups of quantizers that share a scale.

    The first quantizer of a group has an observer if any of them has one. A quantizer whose spec differs from that of
    the operator's output is left out. Pools share only power-of-two scales.
    """
    backend = cast("Backend | None", graph_module.meta.get("backend"))
    groups: list[Group] = []
    for node in graph_module.graph.nodes:
        if backend is None or op_class(node) not in backend.aligned:
            continue
        meeting = quantizers_around(node, backend)
        if op_class(node) in _POOLS and not all(one.spec.powers_of_two for one in meeting):
            continue
        meeting = [one for one in meeting if one.spec == meeting[-1].spec]
        joined = [group for group in groups if any(a is b for a in group for b in meeting)]
        members = list({id(one): one for one in sum(joined, meeting)}.values())
        groups = [group for group in groups if group not in joined] + [members]
    return [sorted(group, key=lambda one: one.observer is None) for group in groups if len(group) > 1]


def quantizers_around(node: fx.Node, backend: Backend) -> Group:
    """Returns the existing quantizers of a node's inputs and then of its output (after a fused activation)."""
    after = quantizer_after(fused_activation(node, backend.fuses) or node)
    found = [*map(quantizer_of, node.all_input_nodes), after]
    return [cast(FakeQuantize, module_of(one)) for one in found if one is not None]


@torch.no_grad()
def settle_together(group: Sequence[FakeQuantize]) -> None:
    """Sets the scale and zero point of a group's first quantizer, from which the caller copies them to the others.

    They are those of the first quantizer with a fixed scale; else they follow from a range that covers all ranges.
    """
    standing = next((one for one in group if one.frozen), None)
    if standing is not None:
        group[0].scale.copy_(standing.scale)
        group[0].zero_point.copy_(standing.zero_point)
        return
    ends = [(one.bounds if one.observer is None else (one.observer.low, one.observer.high)) for one in group]
    device = group[0].scale.device
    low, high = (
        torch.stack([torch.as_tensor(end, device=device) for end in side]) for side in zip(*ends, strict=True)
    )
    group[0].follow_range(low.float().amin(), high.float().amax())


@torch.no_grad()
def choose_shared_ranges(graph_module: fx.GraphModule) -> None:
    """Gives each group the range with the least sum of relative squared errors over its tensors, by their histograms.

    This applies only to scales that are powers of two. With these, a range that covers all tensors may cost the smaller
    ones several bits. A group stays unchanged if an observer has no histogram or a scale is fixed.
    """
    for group in shared_groups(graph_module):
        observers = [one.observer for one in group if isinstance(one.observer, HistogramObserver)]
        if len(observers) < len(group) or not group[0].spec.powers_of_two or any(one.frozen for one in group):
            continue
        found = [points_of(one.histogram) for one in observers]
        power = [
            (points.square() @ shares).clamp(min=torch.finfo(points.dtype).tiny) for points, shares in found
        ]
        shares = torch.cat([one / by for (_, one), by in zip(found, power, strict=True)])
        ends = min(one.low.item() for one in observers), max(one.high.item() for one in observers)
        low, high = range_of(torch.cat([points for points, _ in found]), shares, ends, group[0].spec)
        for one in observers:
            one.low.fill_(low)
            one.high.fill_(high)
