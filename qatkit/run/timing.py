"""Times calls by two clocks without changing the random numbers of a run.

PyTorch's threads wait for each other in busy loops. If other programs use the processor, a step of 0.1 processor
seconds then takes up to 3.6, and differences of such times mean nothing. So processor time is measured in one thread
(`Timing.each`, `Timing.once`), where it hardly depends on the load. Only the elapsed time is measured with all threads.
"""

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


class Parts(NamedTuple):
    """The time of a call in seconds, as a function of its number of samples.

    Attributes:
        each: the time per sample.
        once: the constant part.
    """

    each: float
    once: float


class Timing(NamedTuple):
    """The measured time of a call.

    Attributes:
        each: the processor seconds per sample in one thread.
        once: the constant part of the processor seconds in one thread.
        samples: the number of samples of the call that was run with all threads.
        elapsed: the elapsed seconds of that call.
    """

    each: float
    once: float
    samples: int
    elapsed: float

    @classmethod
    def of_two(cls, less: float, few: int, more: float, samples: int, elapsed: float) -> Timing:
        """Returns the timing of a call with two numbers of samples.

        Args:
            less: the processor seconds in one thread for `few` samples.
            few: the smaller number of samples.
            more: the processor seconds in one thread for `samples`.
            samples: the larger number of samples.
            elapsed: the elapsed seconds for `samples` with all threads.
        """
        slope = max(0.0, more - less) / max(1, samples - few)
        each = min(slope, more / samples)  # the constant part is at least 0
        return cls(each, more - samples * each, samples, elapsed)

    def parts(self, wait: float) -> Parts:
        """Returns the elapsed time for any number of samples.

        Samples count by their processor time. The time that threads wait for each other is part of the constant
        part, since it depends on the number of operators and hardly on the number of samples.

        Args:
            wait: the elapsed seconds per processor second of one thread.
        """
        work = self.once + self.samples * self.each
        each = self.each * (min(wait, self.elapsed / work) if work else 0.0)
        return Parts(each, self.elapsed - self.samples * each)


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
    """Restores the random generators and the number of threads on exit, and suppresses warnings.

    The measured stage will give the warnings itself.

    Args:
        cuda: whether the context uses the GPU, possibly for the first time.
    """
    states, threads = (random.getstate(), np.random.get_state()), torch.get_num_threads()
    devices = range(torch.cuda.device_count()) if cuda or torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(states[0])
            np.random.set_state(states[1])
