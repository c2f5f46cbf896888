"""The front of mixed precisions on the page: a drawing whose points carry their numbers, and a table of them.

The line is inline SVG, which stretches with the page; the numbers are HTML that is laid over it, so that they keep
their size at any width.
"""

from __future__ import annotations

import math
from html import escape

from qatkit.records.precision import Precision, PrecisionPoint
from qatkit.records.results import Results
from qatkit.report import svg
from qatkit.report.html import section, table
from qatkit.report.precision_text import cells, columns, named, told
from qatkit_verify.records import TaskNames

_STEP = 10.0  # dB between two lines of the grid


def precision_section(results: Results) -> str:
    """The section; "" where nothing was searched."""
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
        f'<p class="soft">{escape(told(results))}.</p>',
        _drawing(front, results.task),
        table(head, rows, "dense"),
        '<p class="soft small">A point is built by the command of this run with the last column in place of '
        "precision=auto.</p>",
        f"<details><summary>Float operators of each point</summary><ul>{floats}</ul></details>"
        if floats
        else "",
    )


def _last(cell: str) -> str:
    return f'<td class="left" style="white-space:nowrap"><code>{escape(cell)}</code></td>'


def _drawing(front: Precision, task: TaskNames) -> str:
    """SQNR over milliseconds; float, which has no error, is a number on the upper edge."""
    known = [point.sqnr_db for point in front.points if point.sqnr_db is not None] or [0.0]
    low, high = _STEP * math.floor(min(known) / _STEP), _STEP * math.ceil((max(known) + 1) / _STEP)
    end = 1.05 * max(point.ms for point in front.points)
    places = [(point.ms / end, point.sqnr_db) for point in front.points]
    names = [f"{point.number}, {point.name}, {point.ms:.3f} ms" for point in front.points]
    drawn = svg.lines([("through", places, names)], low, high, _STEP)
    pins = "".join(
        _pin(point, x, 1.0 if y is None else (y - low) / (high - low))
        for point, (x, y) in zip(front.points, places, strict=True)
    )
    count = round((high - low) / _STEP)
    ticks = "".join(f"<span>{low + _STEP * i:.0f}</span>" for i in range(count, -1, -1))
    return (
        f"<h3>SQNR of the {escape(task.outputs)}, dB, over milliseconds (float on the upper edge)</h3>"
        f'<div class="depth"><div class="ticks">{ticks}</div><div class="front">{drawn}{pins}</div></div>'
        f'<div class="ends"><span>0</span><span>{end:.3g} ms</span></div>'
    )


def _pin(point: PrecisionPoint, x: float, y: float) -> str:
    chosen = " chosen" if point.chosen else ""
    return (
        f'<span class="pin{chosen}" style="left:{100 * x:.2f}%;bottom:{100 * y:.2f}%">{point.number}</span>'
    )
