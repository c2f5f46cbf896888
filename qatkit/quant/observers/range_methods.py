"""Methods that choose a range from a histogram: their interface, and the observer that keeps the histogram.

A method is a frozen dataclass whose fields are its settings. `range_of(histogram, spec)` returns (low, high)
with histogram.low ≤ low ≤ high ≤ histogram.high, to the precision of a bin. It is a pure function, so that
one pass over the images serves all methods. Values outside the range are clipped. `numerics.choose_qparams`
widens the range to hold zero, and to both sides where `spec` is symmetric.

Fine-tuning does not move such a range: a histogram over activations of changing weights would not describe
any one model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qatkit.quant import scale_types
from qatkit.quant.observers.base import Observer
from qatkit.quant.observers.histogram import Histogram
from qatkit.quant.spec import QuantSpec

Ends = tuple[float, float]


class Method:
    """The interface of range methods."""

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        """Returns (low, high) for a tensor that will be quantized by `spec`; the histogram must not be empty."""
        raise NotImplementedError


@dataclass(frozen=True)
class MinMax(Method):
    """The range of all values: nothing is clipped."""

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        return histogram.low.item(), histogram.high.item()


class HistogramObserver(Observer):
    """An observer with a histogram and the method that chooses a range from it.

    Attributes:
        low, high: the extremes until `finish`, then the chosen range.
        histogram: the histogram; it is kept after `finish`, so that another method needs no second pass.
    """

    follows_training = False

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method, self.histogram = method, Histogram()

    def update(self, low: Tensor, high: Tensor, values: Tensor) -> None:
        self.histogram.add(values, low, high)
        self.low.copy_(self.histogram.low)
        self.high.copy_(self.histogram.high)

    def all_reduce(self) -> None:
        self.histogram.all_reduce()

    def finish(self, spec: QuantSpec) -> None:
        if self.histogram.low <= self.histogram.high:
            ends = chosen_range(self.method, self.histogram, spec)
            for end, chosen in zip((self.low, self.high), ends, strict=True):
                end.copy_(torch.tensor(chosen))


def chosen_range(method: Method, histogram: Histogram, spec: QuantSpec) -> Ends:
    """Returns the method's range; if `spec` restricts scales, the best range near it that has an allowed scale."""
    ends = method.range_of(histogram, spec)
    return ends if spec.any_scale else scale_types.range_of(*points_of(histogram), ends, spec)


def points_of(histogram: Histogram) -> tuple[Tensor, Tensor]:
    """Returns the middle [n] of each bin that is not empty (0 if it starts at 0), and its share [n] of all values."""
    counts, edges = histogram.bins()
    points = torch.where(edges[:-1] == 0, 0.0, (edges[:-1] + edges[1:]) / 2)[counts > 0].float()
    return points, (counts[counts > 0] / counts.sum()).float()


def prefix(values: Tensor) -> Tensor:
    """Returns prefix sums [n + 1] of `values` [n]: the sums of the first 0, 1, ... n values."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def within(low: float, high: float, least: float, most: float) -> Ends:
    """Returns the part of [low, high] inside [least, most]."""
    return min(max(low, least), most), max(min(high, most), least)


def folded(histogram: Histogram) -> tuple[Tensor, Tensor]:
    """Returns counts [n] and edges [n + 1] of |x|; zero is an edge, so that the bins of x and -x coincide."""
    counts, edges = histogram.bins()
    width = histogram.width
    first = math.floor(edges[0].item() / width)
    index = torch.arange(first, first + len(counts))
    target = torch.where(index < 0, -1 - index, index)
    n = int(target.max()) + 1
    folded = torch.zeros(n, dtype=torch.float64).index_add_(0, target, counts)
    folded_edges = torch.arange(n + 1, dtype=torch.float64) * width
    folded_edges[-1] = edges[[0, -1]].abs().max()
    return folded, folded_edges
