"""A histogram of a stream of values, in memory that does not grow with the stream.

Bins are [g·w, (g+1)·w) for integers g. The width w is the smallest power of two with which the fixed number
of bins covers everything seen, so zero is always an edge. When the range grows, w doubles and bins are joined
in pairs (floor(floor(x/w)/2) = floor(x/2w)). No count is lost or split, and the result is the same as if the
final width had been known from the start. Width and first bin follow from the smallest and largest value. The
state is thus the counts and these two values, it does not depend on the order of batches, and histograms of
several processes add up exactly.

The extremes are those of all values. All values of a small tensor are counted; of a large one, every s-th is,
where s is coprime to the tensor's size. No row, column or channel is left out or sampled more often, and the
next image is sampled at other positions. See `stride`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qatkit.quant.observers.base import in_one_process

BINS = 8192
# At least this many values of a batch are counted, and at least every 16th.
_ENOUGH, _EVERY = 2**17, 16
# An index reaches 2^22 at most, so that float32 holds it and half of it exactly; and 2^126 is a float32.
_INDEX_BITS, _FINEST = 22, -126


def stride(count: int) -> int:
    """Returns the step s with which values of a batch of `count` are counted, coprime to `count`.

    With n values counted in total, the share p of values beyond some limit is known to about
    sqrt(p(1 - p)/n):
    0.01 % to ± 0.003 % from one batch (n = 2^17), to ± 0.001 % from eight.
    """
    step = max(1, min(_EVERY, -(-count // _ENOUGH)))
    while math.gcd(step, count) > 1:
        step -= 1
    return step


def grid(low: float, high: float, bins: int) -> tuple[int, int]:
    """Returns (e, first) of the finest bins that cover [low, high]: their width is 2^e, the first one `first`."""
    reach, span = max(abs(low), abs(high)), high - low
    # Without values to choose a width by, bins are as fine as possible: they can only be joined later.
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
        bins: number of bins; between half of them and all are in use.

    Attributes:
        counts: [bins] int64, from the bin that holds `low` on.
        low, high: rank-0 float32, exact extremes of all values; low > high before the first batch, not finite
            after a batch that holds a NaN or an infinity (which is not counted).
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
        """Takes in one batch.

        Args:
            values: any shape; those outside [low, high] count as the nearer of the two.
            low, high: rank 0, the extremes of `values` (narrower where an absorbed ReLU cuts them).
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
        """Makes this the histogram of all ranks' streams, on each rank; does nothing in one process."""
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
        """Moves the counts of one grid into another that is as coarse or coarser."""
        (fine, old), (coarse, new) = before, after
        index = torch.arange(len(self.counts), device=self.counts.device)
        target = ((index + old) >> (coarse - fine)) - new
        # Bins past the end are not in use and hold no counts.
        self.counts.copy_(
            torch.zeros_like(self.counts).index_add_(0, target.clamp_(max=len(self.counts) - 1), self.counts)
        )
