"""The epochs of the stages that trained, on the page: a drawing and a table each."""

from __future__ import annotations

import math
from html import escape

from qatkit.records.results import Results
from qatkit.records.tried import Curve
from qatkit.report import svg
from qatkit.report.curve_text import cells, columns, measured
from qatkit.report.html import section, table
from qatkit_verify.records import TaskNames


def curve_section(results: Results) -> str:
    """A box for each stage whose epochs were looked at."""
    return "".join(
        section(
            f"Epochs of {curve.stage}",
            _said(curve, results.task),
            _drawn(curve, results.task),
            _table(curve, results.task),
        )
        for curve in results.curves
    )


def _said(curve: Curve, task: TaskNames) -> str:
    name = task.main.name[:1].upper() + task.main.name[1:]
    return f'<p class="soft">{escape(name)}: {escape(measured(curve))}.</p>'


def _drawn(curve: Curve, task: TaskNames) -> str:
    if len(curve.epochs) < 2:
        return ""
    values = [one.score for one in curve.epochs]
    step = 10 ** math.ceil(math.log10(max(max(values) - min(values), 0.1) / 5))  # of the grid
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step + 1e-9) * step
    last = curve.epochs[-1].step
    points = [(one.step / last, one.score) for one in curve.epochs]
    names = [f"epoch {row[0]}{', kept' if row[-1] else ''}" for row in cells(curve)]
    grid = f'<p class="soft">From {low:g} to {high:g} {escape(task.main.unit)}, a line each {step:g}.</p>'
    return svg.lines([("found", points, names)], low, max(high, low + step), step, unit=task.main.unit) + grid


def _table(curve: Curve, task: TaskNames) -> str:
    rows = [("main" if row[-1] else "", list(row)) for row in cells(curve)]
    return f"<details><summary>Every epoch</summary>{table(columns(task), rows, 'dense')}</details>"
