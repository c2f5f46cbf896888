"""Chooses one of several files that were timed in turns.

FLOAT is the float file. In TABLE, the backend's table of operators decides which ones run in int8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from qatkit_verify.placement.quiet import Timed
from qatkit_verify.placement.record import FLOAT, TABLE, Measured

Times = Mapping[str, Sequence[float]]  # milliseconds of the fastest run of each session, by file


def chosen(timed: Timed, threads: int) -> str:
    """Returns the name of the file to choose.

    If the machine was not quiet, a busy core may have made a file up to `threads` times slower than a file
    that does not need that core. A smaller lead then proves nothing.

    Args:
        timed: the times of the files, which include FLOAT and TABLE.
        threads: the number of threads of a run.
    """
    return fastest(timed.ms, 1 if timed.quiet else threads)


def fastest(times: Times, lead: float = 1) -> str:
    """Returns the name of the fastest file except FLOAT if it is clearly faster than TABLE, else TABLE.

    It must be faster in every session, and by more than the sessions differ. A machine may be slower for
    some seconds, which slows all files alike, so ratios within a session are compared.

    Args:
        times: the times of the files, which include FLOAT and TABLE.
        lead: the speed-up over TABLE that the file must exceed in every session.
    """
    best = min((name for name in times if name != FLOAT), key=lambda name: min(times[name]))
    ratios = _over(times, best)
    return best if min(ratios) > lead and median(ratios) - 1 > _spread(ratios) else TABLE


def noise(times: Times) -> float:
    """Returns how much a file's speed-up over TABLE varies between sessions (`_spread`); median of the files."""
    return median(_spread(_over(times, name)) for name in times if name != TABLE)


def _over(times: Times, name: str) -> list[float]:
    """Returns a file's speed-up over TABLE in each session: TABLE's time divided by the file's."""
    return [table / mine for table, mine in zip(times[TABLE], times[name], strict=True)]


def _spread(ratios: Sequence[float]) -> float:
    """Returns half of the range, as a share of the median."""
    return (max(ratios) - min(ratios)) / 2 / median(ratios)


def measured(name: str, floats: int, opened: int, predicted: float | None, times: Times) -> Measured:
    """Returns the record of the file `name` in `times`; the other arguments are as in `Measured`."""
    ratios = _over(times, name)
    return Measured(
        name, floats, opened, predicted, min(times[name]), median(ratios), min(ratios), max(ratios)
    )
