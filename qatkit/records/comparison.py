"""A run as one row, and the rows that nothing beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qatkit.records.figures import Figures
from qatkit_verify.classification import NAMES
from qatkit_verify.records import TaskNames

# What a run came to.
MET, SHORT, UNFINISHED, BROKEN = "every bound met", "falls short", "unfinished", "broken"


@dataclass(frozen=True)
class Row(Figures):
    """One run; figures are of its exported file.

    Attributes:
        folder: relative to the folder that is compared, with "/".
        state: one of the above; `why` says more of all but the first.
        recipe: the run's `name`, which is its recipe's unless the command line says otherwise.
        backend: the target's rules, by name.
        page: whether it has a report.html.
        task: what the figures are of.
        data, machine: what it was measured on, in words.
    """

    folder: str
    state: str
    why: str = ""
    recipe: str = ""
    backend: str = ""
    model: str = ""
    page: bool = False
    task: TaskNames = NAMES
    data: str = ""
    machine: str = ""

    @property
    def accuracy(self) -> float | None:
        """The main metric, or without labels the percentage that is decided as by the float file."""
        return self.same if self.score is None else self.score

    @property
    def same(self) -> float | None:
        """Percent of the outputs that are decided as by the float file."""
        return None if self.agreement is None else 100 * self.agreement

    @property
    def measured_on(self) -> str:
        """Rows that differ in it can't be compared: another metric, other test images, or another machine."""
        metric = "" if self.task.main == NAMES.main else self.task.main.title
        return "; ".join(filter(None, (metric, self.data, self.machine)))


def front(rows: Sequence[Row]) -> list[bool]:
    """Which rows no other one beats that was measured on the same: in accuracy, latency and size at once.

    A row without one of the three, or one that falls short, neither is on the front nor beats another.
    """
    return [
        _stands(one)
        and not any(
            _stands(other) and _beats(other, one) for other in rows if other.measured_on == one.measured_on
        )
        for one in rows
    ]


def _stands(row: Row) -> bool:
    return row.state == MET and None not in (row.accuracy, row.latency_ms, row.bytes)


def _cost(row: Row) -> float:
    """Less is better; without a score by the percentage that is decided as by float, of which more is better."""
    falling = row.score is None or row.task.main.higher_is_better
    return -(row.accuracy or 0.0) if falling else row.accuracy or 0.0


def _beats(first: Row, second: Row) -> bool:
    """No worse in anything, and better in something."""
    pairs = [(_cost(row), row.latency_ms or 0.0, row.bytes or 0.0) for row in (first, second)]
    return pairs[0] != pairs[1] and all(a <= b for a, b in zip(*pairs, strict=True))
