"""The front of mixed precisions in words and figures, once for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from qatkit.records.precision import PrecisionPoint
from qatkit.records.results import Results
from qatkit_verify.records import TaskNames

_SITES = 12  # operators that are named, of those that a point leaves float


def columns(task: TaskNames) -> tuple[str, ...]:
    """The heads of the table of points."""
    near = (task.main.title, f"same {task.decision} %", "SQNR dB")
    return ("point", "float", "predicted ms", "ms", "speed-up", *near, "export it")


def cells(point: PrecisionPoint, operators: int, folder: str) -> tuple[str, ...]:
    """As `columns`, of a point of a front over so many operators."""
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


def told(results: Results) -> str:
    """How the front came about, and what was chosen."""
    front = results.precision
    assert front is not None
    return (
        f"{len(front.points)} of {front.measured} files that were made are beaten by none in both time and error, on "
        f"{front.images:,} images that were held out; ms is the fastest run of each, in turns; chosen: point "
        f"{front.chosen.number}, {front.chosen.name}: {front.note}"
    )


def named(sites: Sequence[str]) -> str:
    """Operators, the first few by name."""
    more = f" and {len(sites) - _SITES} more" if len(sites) > _SITES else ""
    return ", ".join(sites[:_SITES]) + more


def lines(results: Results) -> list[str]:
    """What the terminal says; the operators of the point that was chosen, by name."""
    front = results.precision
    if front is None:
        return []
    rows = [
        columns(results.task),
        *(cells(point, front.operators, results.output_dir) for point in front.points),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    marks = ["", *("  <- chosen" if point.chosen else "" for point in front.points)]
    drawn = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + mark
        for row, mark in zip(rows, marks, strict=True)
    ]
    floats = front.chosen.floats
    return [f"precision: {told(results)}", *drawn, *([f"  float: {named(floats)}"] if floats else [])]
