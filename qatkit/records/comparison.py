"""A run as a row of a table, and the Pareto front of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qatkit.records.figures import Figures
from qatkit_verify.classification import NAMES
from qatkit_verify.records import TaskNames

# The outcomes of a run.
MET, SHORT, UNFINISHED, BROKEN = "all bounds met", "falls short", "unfinished", "broken"


@dataclass(frozen=True)
class Row(Figures):
    """A run as a row, with the figures of its exported file.

    Attributes:
        folder: the folder of the run, relative to the compared folder, with "/".
        state: `MET`, `SHORT`, `UNFINISHED` or `BROKEN`; `why` explains all except the first.
        recipe: the `name` of the run, which is that of its recipe unless the command line sets another.
        backend: the name of the backend.
        model: the name of the model.
        page: whether it has a report.html.
        task: the task of the figures.
        data, machine: descriptions of the data and the machine of the measurement.
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
        """The main metric, or without labels the percentage of the same decisions as the float file."""
        return self.same if self.score is None else self.score

    @property
    def same(self) -> float | None:
        """The percentage of outputs with the same decision as the float file."""
        return None if self.agreement is None else 100 * self.agreement

    @property
    def measured_on(self) -> str:
        """A description of the metric, test images and machine; rows in which it differs cannot be compared."""
        metric = "" if self.task.main == NAMES.main else self.task.main.title
        return "; ".join(filter(None, (metric, self.data, self.machine)))


def front(rows: Sequence[Row]) -> list[bool]:
    """Returns whether each row is on the Pareto front of accuracy, latency and size.

    Only rows with the same metric, test images and machine are compared. A row without one of the three
    figures, or one that misses a bound, is not on the front and excludes no other row.
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


def cost(row: Row) -> float:
    """Returns the cost of a row (lower is better), from its score or, without one, from its agreement with float."""
    falling = row.score is None or row.task.main.higher_is_better
    return -(row.accuracy or 0.0) if falling else row.accuracy or 0.0


def _beats(first: Row, second: Row) -> bool:
    """Returns whether `first` is at least as good as `second` in all figures, and better in at least one."""
    pairs = [(cost(row), row.latency_ms or 0.0, row.bytes or 0.0) for row in (first, second)]
    return pairs[0] != pairs[1] and all(a <= b for a, b in zip(*pairs, strict=True))
