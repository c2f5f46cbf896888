"""Times files in sessions, and uses only the sessions in which the machine was quiet.

Other work during a measurement does not slow all files equally. With one of two cores taken, a float file
takes up to twice its time. An int8 file takes less than twice, since half of its time may be a
DequantizeLinear with a single thread anyway. So a file that is faster under load may be slower once the core
is free.
Two signs reveal such work:

- threads that were ready to run and had no core (`latency.Waiting`);
- a session in which all files take longer than in another: the clock went down, or another virtual machine
  on the same host uses a core.

Such a session is repeated, up to a limit. If too few are quiet, all sessions count, and a file has to be
faster in each, quiet or not. If none is quiet, only a lead that no busy core explains is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qatkit_verify.latency import Session

_WAITED = 0.05  # maximum time of waiting, relative to the time that threads ran
_SLOWER = 1.15  # maximum time relative to the best session (median of files); the position of weights can cause 1.07
_MOST = 2  # maximum number of sessions, as a multiple of the requested number


@dataclass(frozen=True)
class Timed:
    """The times of the files.

    Attributes:
        ms: the time of each session's fastest run in milliseconds, by file. Only quiet sessions are included
            if there are as many as requested, else all.
        quiet: whether there was a quiet session.
        waited: the time that the threads waited for a core, relative to the time that they ran; the median of
            all sessions.
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
    """Times files in turns until the requested number of sessions was quiet, but in at most twice as many sessions.

    Args:
        files, input_shape, batch, threads, runs, sessions, options: see `latency.quickest`.
    """
    from qatkit_verify.latency import every_session  # imports ONNX Runtime

    every = every_session(files, input_shape, batch=batch, threads=threads, runs=runs,
                          most=most_sessions(sessions), options=options)  # fmt: skip
    return summed_up([*until_quiet(every, sessions)], sessions)


def until_quiet(every: Iterable[Session], sessions: int) -> Iterator[Session]:
    """Yields the sessions of `every` as they end, until `sessions` of them were quiet."""
    found: list[Session] = []
    for session in every:
        found.append(session)
        yield session
        if len(quiet_ones(found)) >= sessions:
            return


def most_sessions(sessions: int) -> int:
    """Returns the maximum number of sessions that are timed until `sessions` were quiet."""
    return _MOST * sessions


def quiet_ones(found: Sequence[Session]) -> list[Session]:
    """Returns the sessions in which threads rarely waited and files were about as fast as in the best."""
    best = {name: min(one.ms[name] for one in found) for name in found[0].ms}
    return [
        one
        for one in found
        if one.waited <= _WAITED and median(one.ms[name] / best[name] for name in best) <= _SLOWER
    ]


def summed_up(found: Sequence[Session], sessions: int) -> Timed:
    """Summarizes the sessions `found`; `sessions` is the requested number of quiet ones."""
    calm = quiet_ones(found)
    kept = calm if len(calm) >= sessions else found
    ms = {name: [one.ms[name] for one in kept] for name in found[0].ms}
    return Timed(ms, bool(calm), median(one.waited for one in found))
