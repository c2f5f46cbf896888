"""The Pareto front of mixed precisions (operators in int8 or float), on the terminal and on the page.

The page has a drawing with numbered points, and a table of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from qatkit.records.precision import Precision, PrecisionPoint
from qatkit.records.results import Results
from qatkit.report import svg
from qatkit.report.html import chart, pin, section, table
from qatkit_verify.errors import counted
from qatkit_verify.records import TaskNames
from qatkit_verify.table import drawn

_SITES = 12  # number of float operators of a point that are named


def columns(task: TaskNames) -> tuple[str, ...]:
    """Returns the column headings of the table of points."""
    near = (task.main.title, task.same, "SQNR dB")
    return ("point", "in float", "predicted ms", "ms", "speed-up", *near, "to export")


def cells(point: PrecisionPoint, operators: int, folder: str) -> tuple[str, ...]:
    """Returns the cells of a point in the order of `columns`.

    Args:
        point: a point of the front.
        operators: the number of the model's operators that can be int8.
        folder: the run's folder, which is part of the settings that export the point.
    """
    export = (
        "model.float.onnx"
        if point.floats is None
        else f"precision.front={folder} precision.point={point.number}"
    )
    return (
        str(point.number),
        f"{point.operators} of {operators}",
        f"{point.predicted_ms:.3f}",
        f"{point.ms:.3f}",
        f"{point.ratio:.2f}x",
        "-" if point.score is None else f"{point.score:.2f}",
        f"{100 * point.agreement:.2f}",
        "equal" if point.sqnr_db is None else f"{point.sqnr_db:.1f}",
        export,
    )


def _summary(results: Results) -> str:
    """Returns a sentence on how the front was found and which point was chosen."""
    front = results.precision
    assert front is not None
    verb = "is" if len(front.points) == 1 else "are"
    judged = counted(front.images, f"held-out {results.task.sample}")
    if front.steps:
        judged = f"{counted(front.steps, 'calibration step')}, each file with its own states"
    return (
        f"{len(front.points)} of {counted(front.measured, 'measured file')} {verb} on the Pareto front of time and "
        f"error (without float), on {judged}; ms is the fastest run of each file, timed in alternation; chosen: point "
        f"{front.chosen.number}, {front.chosen.name}: {front.note}"
    )


def named(sites: Sequence[str]) -> str:
    """Returns the first few operators by name, and the number of the others."""
    more = f" and {len(sites) - _SITES} more" if len(sites) > _SITES else ""
    return ", ".join(sites[:_SITES]) + more


def lines(results: Results) -> list[str]:
    """Returns the lines for the terminal, with the names of the float operators of the chosen point."""
    front = results.precision
    if front is None:
        return []
    points = [cells(point, front.operators, results.output_dir) for point in front.points]
    rows = drawn([columns(results.task), *points])
    marks = ["", *("  <- chosen" if point.chosen else "" for point in front.points)]
    table_lines = [f"  {row}{mark}" for row, mark in zip(rows, marks, strict=True)]
    floats = front.chosen.floats
    return [
        f"precision: {_summary(results)}",
        *table_lines,
        *([f"  float: {named(floats)}"] if floats else []),
    ]


_STEP = 10.0  # distance between two grid lines in dB


def precision_section(results: Results) -> str:
    """Returns the section; "" if there was no search."""
    front = results.precision
    if front is None:
        return ""
    head = columns(results.task)
    rows = [
        ("main" if point.chosen else "", [_last(cell) if i == len(head) - 1 else escape(cell) for i, cell in
         enumerate(cells(point, front.operators, results.output_dir))])
        for point in front.points
    ]  # fmt: skip
    floats = "".join(
        f"<li>{point.number}: {escape(named(point.floats))}</li>" for point in front.points if point.floats
    )
    return section(
        "Precision",
        f'<p class="soft">{escape(_summary(results))}.</p>',
        _drawing(front, results.task),
        table(head, rows, "dense"),
        '<p class="soft small">To build a point, repeat the command of this run with the settings in the last '
        "column instead of precision=auto.</p>",
        f"<details><summary>Float operators of each point</summary><ul>{floats}</ul></details>"
        if floats
        else "",
    )


def _last(cell: str) -> str:
    return f'<td class="left" style="white-space:nowrap"><code>{escape(cell)}</code></td>'


def _drawing(front: Precision, task: TaskNames) -> str:
    """Returns a drawing of SQNR over milliseconds. Float has no error, so its number is on the upper edge."""
    known = [point.sqnr_db for point in front.points if point.sqnr_db is not None] or [0.0]
    low, high = _STEP * math.floor(min(known) / _STEP), _STEP * math.ceil((max(known) + 1) / _STEP)
    end = 1.05 * max(point.ms for point in front.points)
    places = [(point.ms / end, point.sqnr_db) for point in front.points]
    names = [f"{point.number}, {point.name}, {point.ms:.3f} ms" for point in front.points]
    line = svg.lines([("through", places, names)], low, high, _STEP)
    pins = "".join(
        pin(point.number, x, 1.0 if y is None else (y - low) / (high - low), chosen=point.chosen)
        for point, (x, y) in zip(front.points, places, strict=True)
    )
    count = round((high - low) / _STEP)
    ticks = [f"{low + _STEP * i:.0f}" for i in range(count, -1, -1)]
    title = f"<h3>SQNR of the {escape(task.outputs)}, dB, over milliseconds (float is on the upper edge)</h3>"
    return title + chart(line, ticks, ("<span>0</span>", f"<span>{end:.3g} ms</span>"), pins)
