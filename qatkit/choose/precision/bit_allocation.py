"""Allocation of bits to weights: estimates the loss for each number of bits, and solves a knapsack problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import fx

from qatkit.algorithms.batches import first_images
from qatkit.algorithms.blocks.journal import current
from qatkit.algorithms.blocks.lesson import tied_tables
from qatkit.analysis.estimate import estimate
from qatkit.analysis.switches import Switch, switches
from qatkit.graph.overrides import OVERRIDDEN
from qatkit.graph.pass_result import PassResult
from qatkit.graph.signature import Example
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize
from qatkit.records.analysis import WEIGHT

if TYPE_CHECKING:
    from qatkit.choose.precision.mixed_bits import MixedBits

BITS = {"int2": 2, "int4": 4, "int8": 8}  # bits per value in the file


@dataclass(frozen=True)
class SharedWeight:
    """A weight with all operators that read it.

    Attributes:
        readers: the Convs and Linears that read the weight.
        fakes: their quantizers, and those of Embeddings whose table is this weight.
        size: the number of values.
    """

    readers: tuple[Switch, ...]
    fakes: tuple[WeightFakeQuantize, ...]
    size: int


def shared_weights(graph_module: fx.GraphModule) -> tuple[list[SharedWeight], list[tuple[str, str]]]:
    """Returns the weights whose bits may be chosen, in graph order, and (site, reason) for operators with overrides."""
    overridden = graph_module.meta.get(OVERRIDDEN, ())
    tables = tied_tables(graph_module)
    by_weight, skipped = dict[int, list[Switch]](), list[tuple[str, str]]()
    for one in switches(graph_module):
        if one.kind != WEIGHT or one.operator is None:
            continue
        by_weight.setdefault(id(one.operator.weight), []).append(one)
    found = []
    for key, readers in by_weight.items():
        if any(one.site in overridden for one in readers):
            skipped += [(one.site, "bits not chosen, since an override sets them") for one in readers]
            continue
        operators = [one.operator for one in readers if one.operator is not None]
        fakes = [operator.weight_fake_quant for operator in operators]
        fakes += [table.weight_fake_quant for table in tables.get(key, ())]
        size = operators[0].weight.numel()
        found.append(SharedWeight(tuple(readers), tuple(one for one in fakes if one is not None), size))
    return found, skipped


def allocate(settings: MixedBits, graph_module: fx.GraphModule, inputs: Iterable[Example]) -> PassResult:
    """Chooses and sets the bits of all weights of a prepared graph except those that an override selects.

    Args:
        settings: the settings (`qatkit.choose.precision.mixed_bits`).
        graph_module: the prepared graph.
        inputs: batches of calibration images.
    """
    weights, skipped = shared_weights(graph_module)
    before = [one.fakes[0].spec.dtype for one in weights]
    batches = list(first_images(graph_module, inputs, settings.images))
    sites = [reader for one in weights for reader in one.readers]
    losses = [dict[str, float]() for _ in weights]
    for dtype in BITS:
        _narrow(weights, [dtype] * len(weights))
        given = [(one, one[0]) for one in batches]
        rows = estimate(graph_module, given, at=sites, seed=current().seed, progress=current().progress)
        by_site = {row.site: row.loss or 0.0 for row in rows}
        for loss, weight in zip(losses, weights, strict=True):
            loss[dtype] = sum(by_site[reader.site] for reader in weight.readers)
    chosen = allotted(losses, [one.size for one in weights], settings.bits)
    _narrow(weights, chosen)
    changed = sum(
        len(one.readers) for one, was, now in zip(weights, before, chosen, strict=True) if was != now
    )
    return PassResult(graph_module, changed, skipped)


def _narrow(weights: Sequence[SharedWeight], dtypes: Sequence[str]) -> None:
    for weight, dtype in zip(weights, dtypes, strict=True):
        for fake in weight.fakes:
            fake.narrow(dtype)


def allotted(losses: Sequence[Mapping[str, float]], sizes: Sequence[int], average: float) -> list[str]:
    """Returns the number type of each weight, for a small sum of losses with at most `average` bits per value.

    For each weight, only types on the lower convex hull of its losses are used. All weights begin with the
    fewest bits. Steps to more bits are then taken by descending gain per bit; a step that does not fit is
    skipped. Up to the first skipped step, the sum of losses is the minimum for the bits used.

    Args:
        losses: the losses of each weight, by the names in `BITS`.
        sizes: the number of values of each weight.
        average: the maximum number of bits per value, on average.
    """
    hulls = [_hull(loss) for loss in losses]
    chosen = [hull[0] for hull in hulls]
    left = average * sum(sizes) - sum(BITS[dtype] * size for dtype, size in zip(chosen, sizes, strict=True))
    steps = [
        ((losses[i][fewer] - losses[i][more]) / ((BITS[more] - BITS[fewer]) * sizes[i]), i, fewer, more)
        for i, hull in enumerate(hulls)
        for fewer, more in pairwise(hull)
    ]
    for _, i, fewer, more in sorted(steps, key=lambda step: (-step[0], step[1])):
        cost = (BITS[more] - BITS[fewer]) * sizes[i]
        if chosen[i] == fewer and cost <= left:
            left, chosen[i] = left - cost, more
    return chosen


def _hull(loss: Mapping[str, float]) -> list[str]:
    """Returns the types on the lower convex hull of the losses, by increasing number of bits."""
    hull: list[str] = []
    for dtype in BITS:
        if hull and loss[dtype] >= loss[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(loss, hull[-2], dtype) <= _slope(loss, hull[-2], hull[-1]):
            hull.pop()
        hull.append(dtype)
    return hull


def _slope(loss: Mapping[str, float], fewer: str, more: str) -> float:
    return (loss[more] - loss[fewer]) / (BITS[more] - BITS[fewer])
