"""Which of the files that were timed in turns is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from qatkit_verify.placement.quiet import Timed
from qatkit_verify.placement.record import FLOAT, TABLE, Measured

Times = Mapping[str, Sequence[float]]  # by file, milliseconds of the fastest run of each session


def chosen(timed: Timed, threads: int) -> str:
    """The file to take.

    Where the machine was not quiet, a core that is missing may have made any file up to `threads` times slower than
    another that does not need it: less of a lead says nothing.

    Args:
        timed: at least two files, FLOAT and TABLE.
        threads: of a run.
    """
    return fastest(timed.ms, 1 if timed.quiet else threads)


def fastest(times: Times, lead: float = 1) -> str:
    """The file that is faster than the backend's table in every session and by more than they differ, else the table.

    A machine may be slower for seconds, for all files alike: what is compared is the ratio within a session.

    Args:
        times: of at least two files, FLOAT and TABLE.
        lead: of how many times the table's speed it has to be beyond that.
    """
    best = min((name for name in times if name != FLOAT), key=lambda name: min(times[name]))
    ratios = _over(times, best)
    return best if min(ratios) > lead and median(ratios) - 1 > _spread(ratios) else TABLE


def noise(times: Times) -> float:
    """By how much a file's ratio to the table differs from session to session; the median of all files."""
    return median(_spread(_over(times, name)) for name in times if name != TABLE)


def _over(times: Times, name: str) -> list[float]:
    """The table's time over a file's, session by session."""
    return [table / mine for table, mine in zip(times[TABLE], times[name], strict=True)]


def _spread(ratios: Sequence[float]) -> float:
    """Half of what lies between the least and the largest, as a share of the median."""
    return (max(ratios) - min(ratios)) / 2 / median(ratios)


def measured(name: str, floats: int, opened: int, predicted: float | None, times: Times) -> Measured:
    """What is kept of a file."""
    ratios = _over(times, name)
    return Measured(
        name, floats, opened, predicted, min(times[name]), median(ratios), min(ratios), max(ratios)
    )
