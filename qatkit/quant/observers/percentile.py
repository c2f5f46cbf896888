"""A range method: the range that holds a share of all values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qatkit.config.fields import limit_of
from qatkit.config.schema import CalibrationConfig
from qatkit.quant.observers.histogram import Histogram
from qatkit.quant.observers.range_methods import Ends, HistogramObserver, Method, folded, prefix, within
from qatkit.quant.spec import QuantSpec


@dataclass(frozen=True)
class Percentile(Method):
    """The range that holds `percentile` percent of the values.

    In a tensor with both signs, (100 - percentile)/2 percent are clipped at each end. In a tensor without
    negative (positive) values, such as after a ReLU, everything is clipped at the upper (lower) end: the
    other end is zero anyway. With symmetric quantization, both ends are at ± the percentile of |x|. Zeros count
    like any value.

    Attributes:
        percentile: the percentage of values in the range, above 50 and up to 100 (which clips nothing).

    Raises:
        ConfigError: the percentile is not above 50 and up to 100.
    """

    percentile: float = 99.99

    def __post_init__(self) -> None:
        limit_of(CalibrationConfig, "percentile").check("calibration.percentile", self.percentile)

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        counts, edges = histogram.bins()
        low, high, share = edges[0].item(), edges[-1].item(), self.percentile / 100
        if share == 1:  # the extremes of all values; a quantile would only be that of the counted values
            return low, high
        if spec.symmetric:
            reach = _quantile(*folded(histogram), share)
            return within(-reach, reach, low, high)
        if low >= 0:
            return low, _quantile(counts, edges, share)
        if high <= 0:
            return _quantile(counts, edges, 1 - share), high
        outside = (1 - share) / 2
        return _quantile(counts, edges, outside), _quantile(counts, edges, 1 - outside)


class PercentileObserver(HistogramObserver):
    """The observer of `Percentile`."""

    def __init__(self, percentile: float = 99.99) -> None:
        super().__init__(Percentile(percentile))


def _quantile(counts: Tensor, edges: Tensor, share: float) -> float:
    """Returns the quantile as np.quantile defines it, interpolated between two values estimated from their bins."""
    position = share * (counts.sum().item() - 1)
    below, above = (_ordered(counts, edges, rank) for rank in (math.floor(position), math.ceil(position)))
    return below + (position - math.floor(position)) * (above - below)


def _ordered(counts: Tensor, edges: Tensor, rank: int) -> float:
    """Returns the value with index `rank` in sorted order, as if the values of a bin were spread evenly in it."""
    inside = prefix(counts)
    i = int(torch.searchsorted(inside[1:].contiguous(), float(rank), right=True))
    share = (rank + 0.5 - inside[i].item()) / counts[i].item()
    return edges[i].item() + share * (edges[i + 1] - edges[i]).item()
