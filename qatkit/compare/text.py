"""The comparison on the terminal: a line a run, then what to know of those that are not as they should be."""

from __future__ import annotations

from collections.abc import Sequence

from qatkit.records.comparison import KEPT, Row, front
from qatkit.report.summary import ABSENT, lined
from qatkit_verify.errors import printable

COLUMNS = (
    *(
        "recipe",
        "backend",
        "top-1 %",
        "drop",
        "same top-1 %",
        "latency ms",
        "speed-up",
        "size MB",
        "size ratio",
    ),
    *("state", "run"),
)
_WHY = 160  # characters


def cells(row: Row) -> tuple[str, ...]:
    """As `COLUMNS`."""
    return (
        row.recipe or ABSENT,
        row.backend or ABSENT,
        figure(row.top1, "{:.2f}"),
        figure(None if row.drop is None else round(row.drop, 2) + 0.0, "{:.2f}"),  # no "-0.00"
        figure(row.agreement, "{:.2f}"),
        figure(row.ms, "{:.2f}"),
        figure(row.ratio, "{:.2f}x"),
        figure(None if row.bytes is None else row.bytes / 1e6, "{:.2f}"),
        figure(row.size_ratio, "{:.3f}"),
        row.state,
        row.folder,
    )


def figure(value: float | None, form: str) -> str:
    """A figure, or what stands for one that was not measured."""
    return ABSENT if value is None else form.format(value)


def plain_table(rows: Sequence[Row]) -> str:
    """Lines of ASCII, or what the terminal has for other letters, with a newline at the end."""
    marks = front(rows)
    lines = lined([COLUMNS, *map(cells, rows)], [False, *marks], "front")
    told = [f"{row.state}: {row.folder}: {printable(row.why, _WHY)}" for row in rows if row.state != KEPT]
    groups = {row.measured_on for row, mark in zip(rows, marks, strict=True) if mark}
    if any(marks):
        note = (
            "front: of the runs that keep their bounds, beaten by none in accuracy, latency and size at once"
        )
        told.append(
            note + (", among those measured on the same images and machine" if len(groups) > 1 else "")
        )
    return "\n".join([*lines, *told]) + "\n"
