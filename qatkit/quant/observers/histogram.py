"""A histogram of a stream of values, in memory that does not grow with the stream.

Bins are [g·w, (g+1)·w) for integers g. The width w is the smallest power of two with which the fixed number
of bins covers everything seen, so zero is always an edge. When the range grows, w doubles and bins are joined
in pairs (floor(floor(x/w)/2) = floor(x/2w)). No count is lost or split, and the result is the same as if the
final width had been known from the start. Width and first bin follow from the smallest and largest value. The
state is thus the counts and these two values. It does not depend on the order of batches, and histograms of
several processes add up exactly.

The extremes are those of all values. All values of a small tensor are counted. Of a large tensor, every s-th
value is counted, where s is coprime to the tensor's size. No row, column or channel is left out or sampled
more often, and the next image is sampled at other positions. See `stride`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qatkit.quant.observers.base import in_one_process

BINS = 8192
# At least _ENOUGH values of a batch are counted, and at least one in _EVERY.
_ENOUGH, _EVERY = 2**17, 16
# An index is at most 2^22, so that it and its half are exact in float32. A bin is at least 2^-126 wide, so
# that its reciprocal is a float32.
_INDEX_BITS, _FINEST = 22, -126


def stride(count: int) -> int:
    """Returns the distance s between counted values in a batch of `count` values, coprime to `count`.

    With n values counted in total, the standard error of the share p of values beyond some limit is about
    sqrt(p(1 - p)/n). For p = 0.01 % this is 0.003 % with one batch (n = 2^17) and 0.001 % with eight.
    """
    step = max(1, min(_EVERY, -(-count // _ENOUGH)))
    while math.gcd(step, count) > 1:
        step -= 1
    return step


def grid(low: float, high: float, bins: int) -> tuple[int, int]:
    """Returns the finest bins that cover [low, high]: the exponent e of their width 2^e, and the index of the first."""
    reach, span = max(abs(low), abs(high)), high - low
    # Without values that determine a width, bins are as fine as possible, since they can only be joined
    # later.
    by_reach = math.frexp(reach)[1] - _INDEX_BITS if reach else _FINEST
    by_span = math.frexp(span / bins)[1] - 1 if span else _FINEST
    exponent = max(by_reach, by_span, _FINEST)
    while _bin(high, exponent) - _bin(low, exponent) >= bins:
        exponent += 1
    return exponent, _bin(low, exponent)


def _bin(value: float, exponent: int) -> int:
    return math.floor(math.ldexp(value, -exponent))


class Histogram(nn.Module):
    """The histogram of a stream; `state_dict` is all of its state.

    Args:
        bins: number of bins; usually at least half of them are in use.

    Attributes:
        counts: [bins] int64, starting with the bin that contains `low`.
        low, high: exact extremes of all values, rank-0 float32; low > high before the first batch, and not
            finite from a batch with a NaN or an infinity on (that batch and later ones are not counted).
    """

    counts: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, bins: int = BINS) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.int64))
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    @property
    def total(self) -> int:
        """The number of values counted."""
        return int(self.counts.sum())

    @property
    def width(self) -> float:
        """The width of a bin, in units of the values."""
        return math.ldexp(1.0, grid(self.low.item(), self.high.item(), len(self.counts))[0])

    def add(self, values: Tensor, low: Tensor, high: Tensor) -> None:
        """Counts the values of one batch.

        Args:
            values: the batch, in any shape; values outside [low, high] count as the nearer of the two.
            low, high: the extremes of `values`, rank 0 (narrower if an absorbed ReLU cuts them).
        """
        self._widen(low, high)
        if not self._finite:
            return
        exponent, first = grid(self.low.item(), self.high.item(), len(self.counts))
        ends = (_bin(low.item(), exponent) - first, _bin(high.item(), exponent) - first)
        sample = values.flatten()[:: stride(values.numel())].float()
        index = sample.mul(2.0**-exponent).floor_().sub_(first).clamp_(*ends).to(torch.int32)
        self.counts += torch.bincount(index, minlength=len(self.counts))

    def all_reduce(self) -> None:
        """Adds up the histograms of all ranks, on each rank; does nothing in one process."""
        if in_one_process():
            return
        ends = torch.stack([-self.low, self.high])
        torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX)
        self._widen(-ends[0], ends[1])
        torch.distributed.all_reduce(self.counts, op=torch.distributed.ReduceOp.SUM)

    def bins(self) -> tuple[Tensor, Tensor]:
        """Returns counts [n] and edges [n + 1] of the bins in use, float64 on the CPU.

        The outer edges are the extremes, so that every edge lies within them.
        """
        low, high = self.low.item(), self.high.item()
        exponent, first = grid(low, high, len(self.counts))
        n = _bin(high, exponent) - first + 1
        edges = torch.arange(first, first + n + 1, dtype=torch.float64) * math.ldexp(1.0, exponent)
        edges[0], edges[-1] = low, high
        return self.counts[:n].double().cpu(), edges

    @property
    def _finite(self) -> bool:
        return math.isfinite(self.low.item()) and math.isfinite(self.high.item())

    def _widen(self, low: Tensor, high: Tensor) -> None:
        """Extends the range by [low, high], joining bins as it grows."""
        known = self._finite
        before = grid(self.low.item(), self.high.item(), len(self.counts)) if known else (0, 0)
        self.low.copy_(torch.minimum(self.low, low))
        self.high.copy_(torch.maximum(self.high, high))
        if not (known and self._finite):
            return  # nothing is counted yet, or no value will be counted again
        after = grid(self.low.item(), self.high.item(), len(self.counts))
        if after != before:
            self._move(before, after)

    def _move(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        """Moves the counts of one grid into another that is equally coarse or coarser."""
        (fine, old), (coarse, new) = before, after
        index = torch.arange(len(self.counts), device=self.counts.device)
        target = ((index + old) >> (coarse - fine)) - new
        # Bins past the end are not in use and hold no counts.
        self.counts.copy_(
            torch.zeros_like(self.counts).index_add_(0, target.clamp_(max=len(self.counts) - 1), self.counts)
        )
