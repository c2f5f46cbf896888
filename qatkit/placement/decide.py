"""Which of the files that were timed in turns is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from qatkit.placement.record import FLOAT, TABLE, Measured

Times = Mapping[str, Sequence[float]]  # by file, milliseconds of the fastest run of each session


def fastest(times: Times) -> str:
    """The file that is faster than the backend's table in every session and beyond noise, else the table.

    Args:
        times: of at least two files, FLOAT and TABLE.
    """
    table = times[TABLE]
    best = min((name for name in times if name != FLOAT), key=lambda name: min(times[name]))
    always = all(mine < theirs for mine, theirs in zip(times[best], table, strict=True))
    return best if always and min(table) / min(times[best]) > 1 + noise(times) else TABLE


def noise(times: Times) -> float:
    """By how much the sessions of one file differ, as a share; the median of all files."""
    return median(max(seen) / min(seen) - 1 for seen in times.values())


def measured(name: str, floats: int, opened: int, predicted: float | None, times: Times) -> Measured:
    """What is kept of a file."""
    ratios = [table / mine for table, mine in zip(times[TABLE], times[name], strict=True)]
    return Measured(
        name, floats, opened, predicted, min(times[name]), median(ratios), min(ratios), max(ratios)
    )
