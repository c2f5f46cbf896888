"""Times calls by two clocks without changing the random numbers of a run."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class Span(NamedTuple):
    """A duration, or a combination of durations, by two clocks.

    Attributes:
        wall: the elapsed seconds.
        work: the processor seconds, summed over all cores.
    """

    wall: float
    work: float

    def less(self, other: Span) -> Span:
        """Returns the difference of both times, each at least 0."""
        return Span(max(0.0, self.wall - other.wall), max(0.0, self.work - other.work))

    def times(self, factor: float) -> Span:
        """Returns both times multiplied by `factor`."""
        return Span(factor * self.wall, factor * self.work)


def clocks() -> Span:
    """Returns the current values of both clocks."""
    return Span(time.perf_counter(), time.process_time())


def timed(run: Callable[[], Any], device: torch.device | None = None) -> Span:
    """Returns the duration of a call, including its work on `device`."""
    on = device is not None and device.type == "cuda"
    if on:
        torch.cuda.synchronize()
    start = clocks()
    run()
    if on:
        torch.cuda.synchronize()
    return clocks().less(start)


@contextmanager
def undisturbed(*, cuda: bool = False) -> Iterator[None]:
    """Restores every random generator on exit and suppresses warnings, which the measured stage will give itself.

    Args:
        cuda: whether the context uses the GPU, possibly for the first time.
    """
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if cuda or torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
