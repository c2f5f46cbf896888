"""A run as one row, and the rows that nothing beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qatkit_verify.classification import NAMES
from qatkit_verify.records import TaskNames

# What a run came to.
MET, SHORT, UNFINISHED, BROKEN = "every bound met", "falls short", "unfinished", "broken"


@dataclass(frozen=True)
class Row:
    """One run; figures are of its exported file in ONNX Runtime, None where they were not measured.

    Attributes:
        folder: relative to the folder that is compared, with "/".
        state: one of the above; `why` says more of all but the first.
        recipe: the run's `name`, which is its recipe's unless the command line says otherwise.
        backend: the target's rules, by name.
        page: whether it has a report.html.
        task: what the figures are of.
        score, drop: the task's main metric, and by how much it is worse than the float file's.
        agreement: percent of the outputs that are decided as by the float file.
        ms, ratio: median latency, and float's over it.
        bytes, size_ratio: of the file, and over float's.
        images, machine: what it was measured on, in words.
    """

    folder: str
    state: str
    why: str = ""
    recipe: str = ""
    backend: str = ""
    model: str = ""
    page: bool = False
    task: TaskNames = NAMES
    score: float | None = None
    drop: float | None = None
    agreement: float | None = None
    ms: float | None = None
    ratio: float | None = None
    bytes: float | None = None
    size_ratio: float | None = None
    images: str = ""
    machine: str = ""

    @property
    def accuracy(self) -> float | None:
        """The main metric, or without labels the percentage that is decided as by the float file."""
        return self.agreement if self.score is None else self.score

    @property
    def measured_on(self) -> str:
        """Rows that differ in it can't be compared: another metric, other test images, or another machine."""
        metric = "" if self.task.main == NAMES.main else self.task.main.title
        return "; ".join(filter(None, (metric, self.images, self.machine)))


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
    return row.state == MET and None not in (row.accuracy, row.ms, row.bytes)


def _cost(row: Row) -> float:
    """Less is better; without a score by the percentage that is decided as by float, of which more is better."""
    falling = row.score is None or row.task.main.higher_is_better
    return -(row.accuracy or 0.0) if falling else row.accuracy or 0.0


def _beats(first: Row, second: Row) -> bool:
    """No worse in anything, and better in something."""
    pairs = [(_cost(row), row.ms or 0.0, row.bytes or 0.0) for row in (first, second)]
    return pairs[0] != pairs[1] and all(a <= b for a, b in zip(*pairs, strict=True))
