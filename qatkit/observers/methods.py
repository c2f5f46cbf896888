"""How a range is chosen: pure functions of a histogram, so that one pass over the images serves all of them.

A method is a frozen dataclass whose fields are its settings. `range_of(histogram, spec)` gives (low, high)
with histogram.low ≤ low ≤ high ≤ histogram.high, to the precision of a bin. What lies outside is clipped.
`numerics.choose_qparams` widens the range to hold zero, and to both sides where `spec` is symmetric.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qatkit import numerics
from qatkit.config.fields import limit_of
from qatkit.config.schema import CalibrationConfig
from qatkit.observers.histogram import Histogram
from qatkit.spec import DTYPES, QuantSpec

Ends = tuple[float, float]


class Method:
    """The contract."""

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        """(low, high) for a tensor that will be quantized as `spec`; the histogram has seen some values."""
        raise NotImplementedError


@dataclass(frozen=True)
class MinMax(Method):
    """All values: nothing is clipped."""

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        return histogram.low.item(), histogram.high.item()


@dataclass(frozen=True)
class Percentile(Method):
    """The share of values that the range holds.

    Of a tensor with both signs (100 - percentile)/2 is clipped at each end. Of one without negative (positive)
    values, such as after a ReLU, everything at the upper (lower) end: the other end is zero anyway. Of a
    symmetric tensor it is the percentile of |x|. Zeros count as any value does.

    Attributes:
        percentile: above 50, up to 100 (which clips nothing).

    Raises:
        ConfigError: a percentile out of that range.
    """

    percentile: float = 99.99

    def __post_init__(self) -> None:
        limit_of(CalibrationConfig, "percentile").check("calibration.percentile", self.percentile)

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        counts, edges = histogram.bins()
        low, high, share = edges[0].item(), edges[-1].item(), self.percentile / 100
        if share == 1:  # of all values; a quantile would be that of the values counted
            return low, high
        if spec.symmetric:
            reach = _quantile(*_folded(histogram), share)
            return _within(-reach, reach, low, high)
        if low >= 0:
            return low, _quantile(counts, edges, share)
        if high <= 0:
            return _quantile(counts, edges, 1 - share), high
        outside = (1 - share) / 2
        return _quantile(counts, edges, outside), _quantile(counts, edges, 1 - outside)


@dataclass(frozen=True)
class Distribution(Method):
    """mean ± deviations·σ, as far as there are values.

    Four deviations are near the least squared error of a normal distribution at 8 bits. Source: Banner et al.,
    "Post training 4-bit quantization of convolutional networks for rapid-deployment", 2019.

    Raises:
        ConfigError: `deviations` that are not above 0.
    """

    deviations: float = 4.0

    def __post_init__(self) -> None:
        limit_of(CalibrationConfig, "deviations").check("calibration.deviations", self.deviations)

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        counts, edges = histogram.bins()
        middles, share = (edges[:-1] + edges[1:]) / 2, counts / counts.sum()
        mean = (share * middles).sum()
        half = self.deviations * (share * (middles - mean) ** 2).sum().sqrt().item()
        return _within(mean.item() - half, mean.item() + half, edges[0].item(), edges[-1].item())


# Divergences (in nats) that differ by rounding alone: a tensor of few values has none at many thresholds.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Entropy(Method):
    """The threshold at which the quantized distribution tells least apart from the real one.

    For a threshold T on |x| (a tensor of both signs is clipped at ±T), P is the histogram up to T with all that
    is clipped added to its last bin, Q the histogram up to T in which every level's count is spread evenly
    over those of its bins that P fills; T minimises KL(P‖Q), the largest T where several do. Signed tensors
    have half of the levels. The bin at zero is left out, since zero is exact whatever the range: spread over
    a level, the zeros of a ReLU would outweigh everything else. Source: Migacz, "8-bit Inference with
    TensorRT", 2017.

    All thresholds are tried at once: a level's count is a difference of prefix sums, so that one threshold costs
    as many steps as there are levels.

    Attributes:
        bins: of |x|, at most. Finer ones hold too few values each: their chance differences would count as
            information lost.
        thresholds: how many are tried at most.
    """

    bins: int = 2048
    thresholds: int = 512

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        low, high = histogram.low.item(), histogram.high.item()
        counts, edges = _folded(histogram)
        while len(counts) > self.bins:
            counts, edges = _paired(counts, edges)
        counts[0] = 0
        both = spec.symmetric or low < 0 < high
        levels = (spec.quant_max - spec.quant_min + 1) // (2 if both else 1)
        if len(counts) <= levels:
            return low, high
        step = -(-(len(counts) - levels) // self.thresholds)
        tried = torch.arange(len(counts), levels - 1, -step)
        divergence = _divergence(counts, tried, levels)
        best = int((divergence <= divergence.min() + _EQUAL).nonzero()[0])
        reach = edges[tried[best]].item()
        return _within(-reach, reach, low, high)


def _divergence(counts: Tensor, tried: Tensor, levels: int) -> Tensor:
    """KL(P‖Q) [T] of clipping `counts` [n] after the first `tried` [T] bins, each at least `levels`."""
    total = counts.sum()
    inside = _prefix(counts)
    last = counts[tried - 1]
    clipped = total - inside[tried]
    # Bins of level k under threshold i: those from ceil(k·i/levels) on.
    ends = -(-(torch.arange(levels + 1) * tried[:, None]) // levels)
    of_level = inside[ends].diff()  # [T, levels]
    filled = _prefix((counts > 0).double())[ends].diff()
    filled[:, -1] += (last == 0) & (clipped > 0)
    p_of_level = of_level.clone()
    p_of_level[:, -1] += clipped
    p_log_p = _prefix(torch.xlogy(counts, counts))[tried - 1] + torch.xlogy(last + clipped, last + clipped)
    # A last level that holds nothing but what was clipped has no Q: log 0 makes the divergence infinite.
    p_log_q = torch.xlogy(p_of_level, of_level / filled.clamp(min=1)).sum(1)
    divergence = (p_log_p - p_log_q) / total + torch.log(inside[tried] / total)
    return torch.where(inside[tried] > 0, divergence, torch.inf)


@dataclass(frozen=True)
class MSE(Method):
    """The least mean squared error of quantization, rounding and clipping together.

    Every bin is quantized, at its middle, with each of `steps` ranges at a time. The ends shrink together, then
    the upper alone, then the lower alone: first by up to `furthest`, then within one such step. The bin that
    starts at zero stands for zero, which every range holds.

    Attributes:
        steps: ranges tried at a time.
        furthest: the largest factor between an extreme and the end chosen.
    """

    steps: int = 64
    furthest: float = 1024.0

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        full = torch.tensor([histogram.low.item(), histogram.high.item()])
        points, weights = _points(histogram)
        coarse = self.furthest ** -torch.linspace(0, 1, self.steps)
        step = self.furthest ** (1 / (self.steps - 1))
        fine = torch.linspace(1 / step, step, self.steps)
        best, least = full, _squared_error(points, weights, full[None], spec).item()
        for factors, around_best in ((coarse, False), (fine, True)):
            for moved in _moves(full, spec):
                start = best if around_best else full
                tried = torch.where(moved, start * factors[:, None], best)
                tried = torch.stack((tried[:, 0].clamp(min=full[0]), tried[:, 1].clamp(max=full[1])), 1)
                errors = _squared_error(points, weights, tried, spec)
                if errors.min() < least:
                    best, least = tried[errors.argmin()], errors.min().item()
        return _within(best[0].item(), best[1].item(), full[0].item(), full[1].item())


def relative_error(histogram: Histogram, ends: Ends, spec: QuantSpec) -> float:
    """Mean squared error of quantization by the range `ends`, over the mean square of all values."""
    points, weights = _points(histogram)
    energy = (points.square() @ weights).item()
    return _squared_error(points, weights, torch.tensor([ends]), spec).item() / energy if energy else 0.0


def _points(histogram: Histogram) -> tuple[Tensor, Tensor]:
    """A value [n] of each bin that holds any, and the share [n] that it holds."""
    counts, edges = histogram.bins()
    points = torch.where(edges[:-1] == 0, 0.0, (edges[:-1] + edges[1:]) / 2)[counts > 0].float()
    return points, (counts[counts > 0] / counts.sum()).float()


def _moves(full: Tensor, spec: QuantSpec) -> list[Tensor]:
    """Which of the two ends move at a time; one on the far side of zero never does (the range holds zero)."""
    free = torch.stack((full[0] < 0, full[1] > 0))
    if spec.symmetric or not free.all():
        return [free]
    return [free, torch.tensor([False, True]), torch.tensor([True, False])]


def _squared_error(points: Tensor, weights: Tensor, ranges: Tensor, spec: QuantSpec) -> Tensor:
    """Mean squared error [T] of quantizing `points` [n] with each of `ranges` [T, 2]."""
    scale, zero_point = numerics.choose_qparams(ranges[:, 0], ranges[:, 1], spec)
    _, qmin, qmax = DTYPES[spec.dtype]
    scale, zero_point = scale[:, None], zero_point[:, None]
    q = (points / scale).round_().clamp_(qmin - zero_point, qmax - zero_point)
    return q.mul_(scale).sub_(points).square_() @ weights


def _prefix(values: Tensor) -> Tensor:
    """[n] to [n + 1]: sums of the first 0, 1, ... n."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def _within(low: float, high: float, least: float, most: float) -> Ends:
    """The part of [low, high] inside [least, most]."""
    return min(max(low, least), most), max(min(high, most), least)


def _folded(histogram: Histogram) -> tuple[Tensor, Tensor]:
    """Counts [n] and edges [n + 1] of |x|, from zero on: zero is an edge, so bins fall on bins."""
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


def _paired(counts: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Half as many bins, from an edge at zero on."""
    padded = torch.cat([counts, counts.new_zeros(len(counts) % 2)])
    kept = edges[::2] if len(counts) % 2 == 0 else torch.cat([edges[::2], edges[-1:]])
    return padded.view(-1, 2).sum(1), kept


def _quantile(counts: Tensor, edges: Tensor, share: float) -> float:
    """The quantile as np.quantile defines it: between two of the sorted values, each known to a bin."""
    position = share * (counts.sum().item() - 1)
    below, above = (_ordered(counts, edges, rank) for rank in (math.floor(position), math.ceil(position)))
    return below + (position - math.floor(position)) * (above - below)


def _ordered(counts: Tensor, edges: Tensor, rank: int) -> float:
    """The value of `rank`, from 0 on, in sorted order, as if a bin's values lay evenly in it."""
    inside = _prefix(counts)
    i = int(torch.searchsorted(inside[1:].contiguous(), float(rank), right=True))
    share = (rank + 0.5 - inside[i].item()) / counts[i].item()
    return edges[i].item() + share * (edges[i + 1] - edges[i]).item()
