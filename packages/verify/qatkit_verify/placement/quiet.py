"""Files are timed in sessions, and those count in which the machine was quiet.

Work beside a measurement does not slow all files alike. With one of two cores taken, a float file takes up to twice its
time, while an int8 file, half of whose time may be a DequantizeLinear that has one thread anyway, takes less: what is
faster then is slower once the core is free. Two things tell of it:
- threads that were ready to run and had no core (`waiting`);
- a session in which all files take longer than in another: a clock that went down, a core that another guest of a
  virtual machine has.
Such a session is timed again, a few times. Where too few are quiet, all of them are asked, and a file has to be the
faster one in each, quiet or not; where none is, only that is believed which no busy core explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qatkit_verify.latency import Session

_WAITED = 0.05  # of the time that threads ran
_SLOWER = 1.15  # than the best session, in the median of all files; where weights lie makes 1.07 of one file
_MOST = 2  # times as many sessions as are asked for, at most


@dataclass(frozen=True)
class Timed:
    """What was timed.

    Attributes:
        ms: by file, milliseconds of the fastest run of each session: of the quiet ones, where there are as many as were
            asked for, else of all.
        quiet: whether there was a quiet session.
        waited: of the time that the threads ran, what they waited for a core beside it, in the median of all sessions.
    """

    ms: Mapping[str, Sequence[float]]
    quiet: bool
    waited: float


def timed_quietly(
    files: Mapping[str, str | Path],
    input_shape: Sequence[int],
    *,
    batch: int,
    threads: int,
    runs: int,
    sessions: int,
    options: Mapping[str, str] | None = None,
) -> Timed:
    """Times files in turns until so many sessions were quiet, twice as many at most.

    Args:
        files, input_shape, batch, threads, runs, sessions, options: as of `latency.quickest`.
    """
    from qatkit_verify.latency import every_session  # ONNX Runtime, where it can be imported

    every = every_session(files, input_shape, batch=batch, threads=threads, runs=runs,
                          most=most_sessions(sessions), options=options)  # fmt: skip
    return summed_up([*until_quiet(every, sessions)], sessions)


def until_quiet(every: Iterable[Session], sessions: int) -> Iterator[Session]:
    """The first of `every` session until so many were quiet, as they end; `summed_up` takes them."""
    found: list[Session] = []
    for session in every:
        found.append(session)
        yield session
        if len(quiet_ones(found)) >= sessions:
            return


def most_sessions(sessions: int) -> int:
    """How many sessions are timed at most until `sessions` were quiet."""
    return _MOST * sessions


def quiet_ones(found: Sequence[Session]) -> list[Session]:
    """Those whose threads had their cores, and in which not all files took longer than in the best one."""
    best = {name: min(one.ms[name] for one in found) for name in found[0].ms}
    return [
        one
        for one in found
        if one.waited <= _WAITED and median(one.ms[name] / best[name] for name in best) <= _SLOWER
    ]


def summed_up(found: Sequence[Session], sessions: int) -> Timed:
    """What is known of so many sessions, of which `sessions` should be quiet."""
    calm = quiet_ones(found)
    kept = calm if len(calm) >= sessions else found
    ms = {name: [one.ms[name] for one in kept] for name in found[0].ms}
    return Timed(ms, bool(calm), median(one.waited for one in found))
