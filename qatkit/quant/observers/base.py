"""The interface of observers, and the observers that keep only the ends of a range.

An observer sees batches one after the other, and its memory does not grow with their number. Its statistics
are buffers, so that checkpoints hold them and they move with the module between devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qatkit.quant.spec import QuantSpec


class _Company:
    """A switch for reductions over all ranks. It is an attribute, since torch.compile cannot read a ContextVar."""

    wanted = True


def in_one_process() -> bool:
    """Returns whether there are no other ranks to reduce with, or `with_other_ranks(False)` excludes them."""
    return not (_Company.wanted and torch.distributed.is_available() and torch.distributed.is_initialized())


@contextmanager
def with_other_ranks(wanted: bool) -> Iterator[None]:
    """Reduces ranges and statistics over all ranks within the context if `wanted`; otherwise each process uses its own.

    Reductions are turned off for work that one rank does while the others wait for its result, since they would
    deadlock.
    """
    before, _Company.wanted = _Company.wanted, wanted
    try:
        yield
    finally:
        _Company.wanted = before


def ends_of_all_ranks(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the smallest and largest value over all ranks; in one process, `low` and `high` unchanged."""
    if in_one_process():
        return low, high
    ends = torch.stack([-low, high])
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX)
    return -ends[0], ends[1]


def of_first_rank(values: Sequence[Tensor]) -> list[Tensor]:
    """Returns the values of rank 0, so that all ranks continue with the same values; in one process, `values`."""
    if in_one_process():
        return list(values)
    every = torch.cat([one.reshape(-1) for one in values])
    torch.distributed.broadcast(every, 0)
    pieces = every.split([one.numel() for one in values])
    return [piece.view_as(one) for piece, one in zip(pieces, values, strict=True)]


class Observer(nn.Module):
    """The base class of observers, each of which finds the range of one tensor.

    Attributes:
        low, high: the range so far, rank-0 float32; low > high before the first batch.
        follows_training: whether fine-tuning continues to move the range; otherwise it stays as calibrated.
    """

    follows_training = True
    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    @property
    def seen(self) -> bool:
        return bool(self.low <= self.high)

    def update(self, low: Tensor, high: Tensor, values: Tensor) -> None:
        """Updates the statistics with one batch.

        Args:
            low, high: the smallest and largest value of the batch, rank 0, after the activation that the
                FakeQuantize absorbed.
            values: the batch before this activation, in any shape; a value outside [low, high] counts as the
                nearer of the two.
        """
        raise NotImplementedError

    def in_parts(self, wanted: bool) -> None:
        """Sets whether the updates until the next call are parts of one batch, for observers that follow training.

        A step that accumulates gradients over several batches then moves the range like a single batch of all
        these images. Until the first call each update is a batch.
        """

    def finish(self, spec: QuantSpec) -> None:
        """Makes `low` and `high` final; called once after the last batch of calibration.

        Args:
            spec: spec of the tensor's quantization.
        """

    def all_reduce(self) -> None:
        """Makes `low` and `high` the same on all ranks; does nothing in a single process."""
        low, high = ends_of_all_ranks(self.low, self.high)
        self.low.copy_(low)
        self.high.copy_(high)


class MinMaxObserver(Observer):
    """An observer of the smallest and the largest value ever seen."""

    def update(self, low: Tensor, high: Tensor, values: Tensor) -> None:
        self.low.copy_(torch.minimum(self.low, low))
        self.high.copy_(torch.maximum(self.high, high))


class MovingAverageMinMaxObserver(Observer):
    """An observer with an exponential moving average of each batch's extremes, robust to one outlier batch.

    The average is unbiased from the first batch on: the weight of the n-th batch is max(1/n, momentum). A
    range of only zeros is replaced by that of the next batch. After calibration on several ranks, the range is the
    mean of the ranks' averages, weighted by the number of batches of each rank.
    """

    batches: Tensor

    def __init__(self, momentum: float = 0.01) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("batches", torch.tensor(0, dtype=torch.int64))
        # For a batch in parts: the range before the batch, and the ends of its parts so far; () before the
        # first part.
        self._parts: tuple[Tensor, ...] | None = None

    def in_parts(self, wanted: bool) -> None:
        self._parts = () if wanted else None

    def update(self, low: Tensor, high: Tensor, values: Tensor) -> None:
        old: Sequence[Tensor] = (self.low, self.high)
        if self._parts:
            *old, least, largest = self._parts
            low, high = torch.minimum(low, least), torch.maximum(high, largest)
        else:
            self.batches += 1
        if self._parts is not None:
            self._parts = (old[0].clone(), old[1].clone(), low, high)
        weight = torch.clamp(1.0 / self.batches.to(self.low.dtype), min=self.momentum)
        first = (self.batches == 1) | ((old[0] == 0) & (old[1] == 0))
        for mine, before, new in zip((self.low, self.high), old, (low, high), strict=True):
            mine.copy_(torch.where(first, new, before + weight * (new - before)))

    def all_reduce(self) -> None:
        if in_one_process():
            return
        ends = torch.stack([self.low, self.high]).double()
        weighed = torch.cat([ends, ends.new_ones(1)]) * self.batches
        sums = torch.where(self.batches > 0, weighed, 0.0)  # without batches the ends are infinite
        torch.distributed.all_reduce(sums, op=torch.distributed.ReduceOp.SUM)
        if sums[2] > 0:
            self.low.copy_(sums[0] / sums[2])
            self.high.copy_(sums[1] / sums[2])
