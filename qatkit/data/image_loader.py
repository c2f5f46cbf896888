"""A loader of datasets that prepare whole batches; it uses worker processes if they save time.

    in order   first batch: this process ── would the rest take longer than starting workers? ─ no ──> this process
                                                                                              └─ yes ─> workers
    a sampler's order, or workers of an earlier pass are alive ───────────────────────────────────────> workers

Most passes over a small data set finish before a process has started. The batches and their order do not depend on
the process that prepares them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.stopping import leave_to_parent, serving

Batch = tuple[Any, Tensor]  # float32 (N, C, H, W), or tensors by the names of inputs; int64 (N,)
_AT_ONCE = 2**24  # maximum number of floats in a batch of pictures
_TO_START = 0.1  # seconds that a process takes to start


class Failure(NamedTuple):
    """The contents of a ConfigError, since a worker can only pass on exceptions with one argument."""

    key: str
    value: str
    problem: str
    trace: str  # traceback of its cause, which cannot be passed itself

    def error(self) -> ConfigError:
        """Returns the original error."""
        found = ConfigError(self.key, self.value, reason=self.problem)
        found.add_note(self.trace)
        return found


def _as_is(batch: Any) -> Any:
    """Returns the batch unchanged; it is the collate function, since datasets return whole batches."""
    return batch


class _InOrder(Sampler[int]):
    """A sampler of 0, 1, 2, ... without the first `skip`."""

    def __init__(self, count: int) -> None:
        self.count, self.skip = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.skip, self.count))


def at_once(wanted: int, shape: Sequence[int]) -> int:
    """Returns `wanted`, or the largest number of pictures of this shape that fit into 64 MiB in float32.

    The result is the smaller of the two, but at least 1.
    """
    return min(wanted, max(1, _AT_ONCE // math.prod(shape)))


class ImageLoader(DataLoader[Batch]):
    """A DataLoader over datasets that prepare whole batches.

    Args:
        dataset: `EvalImages` or `TrainImages`.
        batch_size: images per batch.
        workers: number of processes for long passes; with 0, batches are prepared in this process.
        persistent: whether the workers are kept for the next pass.
        sampler: order of the dataset's keys; None for 0, 1, 2, ...
        drop_last: whether a last batch that is not full is left out.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        batch_size: int,
        workers: int,
        *,
        persistent: bool = False,
        sampler: Sampler[Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            dataset,
            batch_size,
            sampler=_InOrder(len(dataset)) if sampler is None else sampler,  # type: ignore[arg-type]
            num_workers=workers,
            # From Python 3.14 on, the default start method is not fork. Spawned processes take seconds to
            # start, copy the images in memory, and cannot use a source that cannot be pickled.
            multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
            collate_fn=_as_is,
            pin_memory=torch.cuda.is_available(),
            drop_last=drop_last,
            persistent_workers=persistent and workers > 0,
            worker_init_fn=leave_to_parent if serving() else None,
            generator=torch.Generator(),  # otherwise every pass would draw from torch's global generator
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Yields batches, in order.

        Raises:
            ConfigError: an image cannot be read (the message names the file or the index), or a worker was killed.
        """
        batches = self._batches()
        while True:
            try:
                batch = next(batches, None)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):
                    raise
                reason = f"a worker process ended ({first_line(error)}); set data.workers=0 to use none"
                raise ConfigError("data.workers", self.num_workers, reason=reason) from error
            if batch is None:
                return
            if isinstance(batch, Failure):
                raise batch.error()
            yield batch

    def _batches(self) -> Iterator[Batch | Failure]:
        order = self.sampler
        if not isinstance(order, _InOrder) or self.num_workers == 0 or self._iterator is not None:
            yield from self._prepared()
            return
        spent, count = 0.0, len(self)
        for done, positions in enumerate(cast("Iterator[list[int]]", self.batch_sampler), 1):
            began = time.monotonic()
            batch = cast("Any", self.dataset).__getitems__(positions)
            spent += time.monotonic() - began
            if spent / done * (count - done) <= _TO_START * self.num_workers:
                yield batch
                continue
            order.skip = done * len(positions)
            rest = self._prepared()  # the workers begin while this batch is used
            order.skip = 0
            yield batch
            yield from rest
            return

    def _prepared(self) -> Iterator[Batch | Failure]:
        """Returns an iterator over batches, prepared by the workers or in this process."""
        return cast("Iterator[Batch | Failure]", super().__iter__())
