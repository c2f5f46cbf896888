"""Writes the table for the terminal: one line per run, then notes on runs that miss a bound or have no results."""

from __future__ import annotations

from collections.abc import Sequence

from qatkit.records.comparison import MET, Row, front
from qatkit.report.summary import ABSENT, figure, lined
from qatkit_verify.classification import NAMES
from qatkit_verify.errors import printable

_COSTS = ("latency ms", "speed-up", "size MB", "size ratio")
_WHY = 160  # largest number of characters of a reason


def columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """Returns the column headings; they name the metric if all runs have the same task."""
    tasks = {row.task for row in rows} or {NAMES}
    metric, same = "metric", "same answer as float, %"
    if len(tasks) == 1:
        (task,) = tasks
        metric, same = task.main.title, task.same
    return ("recipe", "backend", metric, "drop", same, *_COSTS, "state", "run")


def cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a row, in the order of `columns`."""
    return (
        row.recipe or ABSENT,
        row.backend or ABSENT,
        figure(row.score),
        figure(None if row.drop is None else round(row.drop, 2) + 0.0),  # avoids "-0.00"
        figure(row.same),
        figure(row.latency_ms),
        row.speed,
        figure(None if row.bytes is None else row.bytes / 1e6),
        figure(row.size_ratio, "{:.3f}"),
        row.state,
        row.folder,
    )


def plain_table(rows: Sequence[Row]) -> str:
    """Returns the table and the notes below it as text that ends in a newline."""
    marks = front(rows)
    lines = lined([columns(rows), *map(cells, rows)], [False, *marks], "front")
    told = [f"{row.state}: {row.folder}: {printable(row.why, _WHY)}" for row in rows if row.state != MET]
    groups = {row.measured_on for row, mark in zip(rows, marks, strict=True) if mark}
    if any(marks):
        note = "front: runs on the Pareto front of accuracy, latency and size that meet their bounds"
        told.append(note + (", among those measured on the same data and machine" if len(groups) > 1 else ""))
    return "\n".join([*lines, *told]) + "\n"
