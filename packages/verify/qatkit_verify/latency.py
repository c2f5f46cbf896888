"""Compares the latency of several ONNX files in one process, round by round.

The machine's speed drifts (other work, clocks), so the files take turns: each round times every file once
(A B A B ...), and a ratio is taken within a round before the median over the rounds.
Two things that would spoil such a measurement are handled:

- ONNX Runtime's worker threads keep spinning for milliseconds after a run and would steal cores from the next
  file's run. `session.force_spinning_stop` ends the spinning with the run; spinning within a run, ONNX
  Runtime's default, stays. (Figures: docs/decisions/0015-small-measurements.md.)
- The previous file's run evicts this file's weights from the caches, so each timed run follows an untimed one
  of the same file: the steady state of a server. With many small files in turn, one untimed run is not enough
  (mobilenet_v2 in float at 64x64, in alternation with seven others, one thread: 0.60 ms after one, 0.40 after
  eight, 0.39 alone), so `every_session` makes up to eight.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import noise_feeds
from qatkit_verify.records import Latency
from qatkit_verify.session import fixed_batch, open_session

WARMUP = 5  # rounds before those that count
# Before a timed run, a small file runs untimed for this long, and at most this often.
WARM_MS, _WARMEST = 6.0, 8
_TASKS = Path("/proc/self/task")


def latency(
    files: Mapping[str, str | Path],
    input_shape: Sequence[int] | Mapping[str, Any] | None,
    *,
    batch: int = 1,
    threads: int = 2,
    runs: int = 50,
    seed: int = 0,
    options: Mapping[str, str] | None = None,
) -> dict[str, Latency]:
    """Times `files` in alternation.

    Args:
        files: ONNX files by name; ratios are relative to the first.
        input_shape: (C, H, W) of one image; the input is noise from `seed`, standard normal or uint8 pixels.
            For files with other inputs, a batch by input name, or None for noise with the shapes that the
            files declare.
        batch: the number of images per run.
        threads: the number of intra-op threads.
        runs: the number of timed rounds.
        seed: the seed of the noise.
        options: the backend's session config entries, for every file.

    Returns:
        `Latency` by name, in the order of `files`.

    Raises:
        ConfigError: `runs` is below 1, ONNX Runtime cannot load a file, a file has another fixed batch size, or
            the size of a dynamic axis is unknown.
    """
    found = run_times(files, input_shape, batch=batch, threads=threads, runs=runs, seed=seed, options=options)
    reference = next(iter(found.values()))
    return {name: from_times(reference, times, batch, threads) for name, times in found.items()}


def run_times(
    files: Mapping[str, str | Path],
    input_shape: Sequence[int] | Mapping[str, Any] | None,
    *,
    batch: int,
    threads: int,
    runs: int,
    seed: int = 0,
    options: Mapping[str, str] | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Returns the time of every run in milliseconds, [runs] by file, measured as in `latency`.

    Args:
        files, input_shape, batch, threads, runs, seed, options: see `latency`.

    Raises:
        ConfigError: see `latency`.
    """
    if runs < 1:
        raise ConfigError("verify.latency_runs", runs, "at least 1 timed run")
    calls = _calls(files, input_shape, batch, threads, seed, options)
    times = rounds(list(calls.values()), runs)
    return {name: times[:, column] for column, name in enumerate(calls)}


def _calls(
    files: Mapping[str, str | Path],
    input_shape: Sequence[int] | Mapping[str, Any] | None,
    batch: int,
    threads: int,
    seed: int,
    options: Mapping[str, str] | None,
) -> dict[str, Callable[[], object]]:
    """Returns, by file, a function that runs it once."""
    entries = {**(options or {}), "session.force_spinning_stop": "1"}
    sessions = {
        name: open_session(path, threads=threads, options=entries, arena=True) for name, path in files.items()
    }
    for name, session in sessions.items():
        if fixed_batch(session) not in (None, batch):
            fixed = fixed_batch(session)
            reason = (
                f"{files[name]} was exported for a fixed batch of {fixed}; set verify.latency_batch={fixed}"
            )
            raise ConfigError("verify.latency_batch", batch, reason=reason)
    given = (batch, *input_shape) if isinstance(input_shape, Sequence) else input_shape
    return {
        name: partial(session.run, None, noise_feeds(session, given, seed, batch))
        for name, session in sessions.items()
    }


def quickest(
    files: Mapping[str, str | Path],
    input_shape: Sequence[int] | Mapping[str, Any],
    *,
    batch: int,
    threads: int,
    runs: int,
    sessions: int = 1,
    options: Mapping[str, str] | None = None,
) -> dict[str, list[float]]:
    """Returns the time in milliseconds of each file's fastest run in each session; files take turns.

    Other work on the machine can only lengthen a run, so the fastest runs are compared. The position of a
    session's weights in memory matters too (7 % between two sessions of one ResNet-18), so a file is opened
    several times.

    Args:
        files, input_shape, batch, threads, options: see `latency`.
        runs: the number of runs per session.
        sessions: the number of sessions per file.
    """
    found = [
        one.ms
        for one in every_session(
            files, input_shape, batch=batch, threads=threads, runs=runs, most=sessions, options=options
        )
    ]
    return {name: [one[name] for one in found] for name in files}


@dataclass(frozen=True)
class Session:
    """A session of a measurement: every file is opened again, and then the files are timed in turns.

    Attributes:
        ms: the time of each file's fastest run in milliseconds, by file.
        waited: the time that the threads waited for a core, relative to the time that they ran.
    """

    ms: Mapping[str, float]
    waited: float


def every_session(
    files: Mapping[str, str | Path],
    input_shape: Sequence[int] | Mapping[str, Any],
    *,
    batch: int,
    threads: int,
    runs: int,
    most: int,
    options: Mapping[str, str] | None = None,
) -> Iterator[Session]:
    """Yields the sessions of `quickest` one by one, at most `most`."""

    def timed(some: Mapping[str, str | Path], count: int, untimed: int) -> Session:
        calls = _calls(some, input_shape, batch, threads, 0, options)
        waiting = Waiting()
        times = rounds(list(calls.values()), count, untimed).min(axis=0)
        return Session(dict(zip(some, times.tolist(), strict=True)), waiting.share())

    name, path = next(iter(files.items()))
    untimed = min(_WARMEST, max(1, math.ceil(WARM_MS / timed({name: path}, 3, 1).ms[name])))
    for _ in range(most):
        yield timed(files, runs, untimed)


def rounds(
    calls: Sequence[Callable[[], object]], runs: int, untimed: int = 1, warmup: int = WARMUP
) -> NDArray[np.float64]:
    """Times functions in turns, each after `untimed` calls of itself; returns milliseconds [runs, calls].

    The first `warmup` rounds are not among the `runs` rounds that are returned.
    """
    times = np.zeros((warmup + runs, len(calls)))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for row in times:
            for column, call in enumerate(calls):
                for _ in range(untimed):
                    call()
                start = time.perf_counter_ns()
                call()
                row[column] = (time.perf_counter_ns() - start) / 1e6
    finally:
        if collecting:
            gc.enable()
    return times[warmup:]


def from_times(
    reference: NDArray[np.float64], times: NDArray[np.float64], batch: int, threads: int
) -> Latency:
    """Returns a file's latency from its times [runs] in milliseconds, with its speed-up over the first file.

    The speed-up is computed in each round, from the times `reference` of the first file.
    """
    p10, median, p90 = (float(value) for value in np.percentile(times, (10, 50, 90)))
    low, ratio, high = (float(value) for value in np.percentile(reference / times, (10, 50, 90)))
    return Latency(median, p10, p90, ratio, low, high, batch, threads, len(times))


class Waiting:
    """The time in which threads of this process were ready to run but had no core.

    It counts from construction; threads that begin or end in between are left out. It reads Linux's schedstat
    (nanoseconds on a core and in the queue for one); on other systems it is always 0.
    """

    def __init__(self) -> None:
        self._before = _threads()

    def share(self) -> float:
        """Returns the time that the threads waited for a core, as a share of the time that they ran."""
        now = _threads()
        pairs = [(self._before[name], now[name]) for name in self._before.keys() & now.keys()]
        ran, waited = (sum(after[k] - before[k] for before, after in pairs) for k in (0, 1))
        return waited / ran if ran else 0.0


def _threads() -> dict[str, tuple[int, int]]:
    """Returns the nanoseconds that each thread ran and waited."""
    found = {}
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(
                OSError, ValueError
            ):  # it ended meanwhile, or this kernel has another format
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[task.name] = (int(ran), int(waited))
    return found
