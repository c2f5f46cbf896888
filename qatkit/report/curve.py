"""The epochs of the training stages: a line per stage on the terminal, a drawing and a table on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from qatkit.records.results import Results
from qatkit.records.tried import Curve, Epoch
from qatkit.report import svg
from qatkit.report.html import chart, section, table
from qatkit.report.summary import ABSENT
from qatkit_verify.errors import counted
from qatkit_verify.records import TaskNames

_SHOWN = 8  # number of epochs on a line of the terminal


def columns(task: TaskNames) -> tuple[str, ...]:
    """Returns the column headings of the table of epochs."""
    return "epoch", "step", task.main.title, "seconds", ""


def cells(curve: Curve) -> list[tuple[str, ...]]:
    """Returns the cells of each epoch in the order of `columns`."""
    return [
        (
            f"{one.epoch:g}" if one.epoch == round(one.epoch) else f"{one.epoch:.2f}",
            str(one.step),
            f"{one.score:.2f}",
            ABSENT if one.seconds is None else f"{one.seconds:.1f}",
            "kept" if one.kept else "",
        )
        for one in curve.epochs
    ]


def measured(curve: Curve, task: TaskNames) -> str:
    """Returns a description of what was measured, and on how many samples of which kind."""
    images = counted(curve.images, f"held-out training {task.sample}")
    if not curve.chosen:
        images = images if curve.held_out else counted(curve.images, f"test {task.sample}")
        return f"the training model on {images} (the last epoch is used)"
    what = "the control in PyTorch" if "control" in curve.stage else "the file in ONNX Runtime"
    seconds = sum(one.seconds or 0.0 for one in curve.epochs)
    return f"{what} on {images} (measured in {seconds:.1f} s)"


def lines(results: Results) -> list[str]:
    """Returns a line per stage for the terminal.

    Of many epochs, it shows some, the last one and the one that was kept.
    """
    return [_line(curve, results.task) for curve in results.curves]


def _line(curve: Curve, task: TaskNames) -> str:
    rows = list(zip(cells(curve), curve.epochs, strict=True))
    every = -(-len(rows) // _SHOWN)
    shown = [row for i, row in enumerate(reversed(rows)) if i % every == 0 or row[1].kept][::-1]
    figures = ", ".join(_figure(row, one) for row, one in shown)
    more = f" ({len(rows)} epochs)" if len(shown) < len(rows) else ""
    return f"epochs of {curve.stage}{more}, {task.main.name} of {measured(curve, task)}: {figures}"


def _figure(row: tuple[str, ...], one: Epoch) -> str:
    return f"{row[0]}: {row[2]}" + (" <- kept" if one.kept else "")


def curve_section(results: Results) -> str:
    """Returns a box for each stage whose epochs were evaluated."""
    task = results.task
    return "".join(
        section(f"Epochs of {curve.stage}", _said(curve, task), _drawn(curve, task), _table(curve, task))
        for curve in results.curves
    )


def _said(curve: Curve, task: TaskNames) -> str:
    name = task.main.name[:1].upper() + task.main.name[1:]
    name += f" ({task.main.unit})" if task.main.unit else ""
    return f'<p class="soft">{escape(name)} of {escape(measured(curve, task))}.</p>'


def _drawn(curve: Curve, task: TaskNames) -> str:
    if len(curve.epochs) < 2:
        return ""
    lines = _grid([one.score for one in curve.epochs])
    low, high, step = lines[0], lines[-1], lines[1] - lines[0]
    begin, end = curve.epochs[0].step, curve.epochs[-1].step
    points = [((one.step - begin) / ((end - begin) or 1), one.score) for one in curve.epochs]
    names = [f"epoch {row[0]}{', kept' if row[-1] else ''}" for row in cells(curve)]
    drawing = svg.lines([("found", points, names)], low, high, step, unit=task.main.unit)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [f"{value:,.{digits}f}" for value in reversed(lines)]
    ends = [f"<span>epoch {cells(curve)[place][0]}</span>" for place in (0, -1)]
    return chart(drawing, ticks, (ends[0], ends[1]))


def _grid(values: Sequence[float]) -> list[float]:
    """Returns the values of the grid lines, from at most the lowest to at least the highest of `values`.

    They are multiples of 1, 2 or 5 times a power of ten, and divide the values' span into at most five parts.
    """
    lowest, highest = min(values), max(values)
    span = (highest - lowest) or abs(highest) / 100 or 1.0
    power: float = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * of for of in (1, 2, 5, 10) if 5.001 * power * of >= span)
    first, last = math.floor(lowest / step + 1e-6), math.ceil(highest / step - 1e-6)
    return [step * place for place in range(first, max(last, first + 1) + 1)]


def _table(curve: Curve, task: TaskNames) -> str:
    rows = [("main" if row[-1] else "", list(row)) for row in cells(curve)]
    return f"<details><summary>Every epoch</summary>{table(columns(task), rows, 'dense')}</details>"
