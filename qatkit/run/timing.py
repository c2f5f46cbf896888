"""Times calls by two clocks, without a trace in what a run draws at random."""

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
    """A time, or a combination of times, by two clocks.

    Attributes:
        wall: seconds that passed.
        work: seconds of all processor cores.
    """

    wall: float
    work: float

    def less(self, other: Span) -> Span:
        """Returns the difference, at least 0."""
        return Span(max(0.0, self.wall - other.wall), max(0.0, self.work - other.work))

    def times(self, factor: float) -> Span:
        """Returns a multiple."""
        return Span(factor * self.wall, factor * self.work)


def clocks() -> Span:
    """Returns both clocks."""
    return Span(time.perf_counter(), time.process_time())


def timed(run: Callable[[], Any], device: torch.device | None = None) -> Span:
    """Returns how long a call takes."""
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
    """Restores every random generator on exit; warnings are left to the stage that is tried.

    Args:
        cuda: whether the context uses the GPU, perhaps for the first time.
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
