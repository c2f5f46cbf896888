"""A range method: the range that loses the least information, as in TensorRT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qatkit.quant.observers.histogram import Histogram
from qatkit.quant.observers.range_methods import Ends, HistogramObserver, Method, folded, prefix, within
from qatkit.quant.spec import QuantSpec

# Smaller differences of divergences (in nats) are ignored, since a tensor of few values has about 0 at many
# thresholds.
_EQUAL = 1e-9


@dataclass(frozen=True)
class Entropy(Method):
    """The threshold at which the quantized distribution diverges least from the real one.

    For a threshold T on |x| (a tensor of both signs is clipped at ±T), P is the histogram up to T, with all
    clipped values added to its last bin. Q is the histogram up to T in which the count of every level (the bins
    that are rounded to one integer) is spread evenly over those of its bins that are not empty in P. T minimizes
    KL(P‖Q); of equally good thresholds the largest is used. Tensors of both signs and symmetric types have half
    as many levels for |x|. The bin at zero is left out, since zero is exact with any range: if the zeros of a
    ReLU were spread over a level, they would outweigh everything else.
    Source: Migacz, "8-bit Inference with TensorRT", 2017.

    All thresholds are tried at once: a level's count is a difference of prefix sums, so the cost per
    threshold is proportional to the number of levels.

    Attributes:
        bins: maximum number of bins of |x|. Finer bins hold too few values each: their random differences
            would count as lost information.
        thresholds: maximum number of thresholds tried.
    """

    bins: int = 2048
    thresholds: int = 512

    def range_of(self, histogram: Histogram, spec: QuantSpec) -> Ends:
        low, high = histogram.low.item(), histogram.high.item()
        counts, edges = folded(histogram)
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
        return within(-reach, reach, low, high)


def _divergence(counts: Tensor, tried: Tensor, levels: int) -> Tensor:
    """Returns KL(P‖Q) [T] of clipping `counts` [n] after the first `tried` [T] bins, each at least `levels`."""
    total = counts.sum()
    inside = prefix(counts)
    last = counts[tried - 1]
    clipped = total - inside[tried]
    # The bins of level k under threshold i begin at ceil(k·i/levels).
    ends = -(-(torch.arange(levels + 1) * tried[:, None]) // levels)
    of_level = inside[ends].diff()  # [T, levels]
    filled = prefix((counts > 0).double())[ends].diff()
    filled[:, -1] += (last == 0) & (clipped > 0)
    p_of_level = of_level.clone()
    p_of_level[:, -1] += clipped
    p_log_p = prefix(torch.xlogy(counts, counts))[tried - 1] + torch.xlogy(last + clipped, last + clipped)
    # If the last level has only clipped values, Q is 0 there, and log 0 makes the divergence infinite.
    p_log_q = torch.xlogy(p_of_level, of_level / filled.clamp(min=1)).sum(1)
    divergence = (p_log_p - p_log_q) / total + torch.log(inside[tried] / total)
    return torch.where(inside[tried] > 0, divergence, torch.inf)


class EntropyObserver(HistogramObserver):
    """The observer of `Entropy`."""

    def __init__(self) -> None:
        super().__init__(Entropy())


def _paired(counts: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Joins bins in pairs, starting from the edge at zero."""
    padded = torch.cat([counts, counts.new_zeros(len(counts) % 2)])
    kept = edges[::2] if len(counts) % 2 == 0 else torch.cat([edges[::2], edges[-1:]])
    return padded.view(-1, 2).sum(1), kept
