"""A run as one row, and the rows that nothing beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What a run came to.
KEPT, SHORT, UNFINISHED, BROKEN = "every bound kept", "falls short", "unfinished", "broken"


@dataclass(frozen=True)
class Row:
    """One run; figures are of its exported file in ONNX Runtime, None where they were not measured.

    Attributes:
        folder: relative to the folder that is compared, with "/".
        state: one of the above; `why` says more of all but the first.
        recipe: the run's `name`, which is its recipe's unless the command line says otherwise.
        backend: the target's rules, by name.
        page: whether it has a report.html.
        top1, drop: percent, and points below the float file's.
        agreement: percent of the outputs with the float file's top-1.
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
    top1: float | None = None
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
        """Percent: top-1, or without labels the share with the float file's top-1."""
        return self.agreement if self.top1 is None else self.top1

    @property
    def measured_on(self) -> str:
        """Rows that differ in it can't be compared: other test images, or another machine."""
        return "; ".join(filter(None, (self.images, self.machine)))


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
    return row.state == KEPT and None not in (row.accuracy, row.ms, row.bytes)


def _beats(first: Row, second: Row) -> bool:
    """No worse in anything, and better in something."""
    pairs = [(-(row.accuracy or 0.0), row.ms or 0.0, row.bytes or 0.0) for row in (first, second)]
    return pairs[0] != pairs[1] and all(a <= b for a, b in zip(*pairs, strict=True))
