"""The algorithms of a run, on the terminal and on the page: those that competed, or those of a fixed list."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from qatkit.algorithms.base import CALIBRATED, FUSED, OBSERVED, PREPARED
from qatkit.records.results import Results
from qatkit.records.tried import Ran, Tried
from qatkit.report.html import section, table
from qatkit.report.summary import ABSENT, figure, lined
from qatkit_verify.errors import counted
from qatkit_verify.records import TaskNames

_ORDER = "in the order in which they ran"
_RAN_COLUMNS = ("algorithm", "when", "changed", "seconds")
_WHEN = {
    FUSED: "before quantization",
    PREPARED: "before calibration",
    OBSERVED: "before calibration, on samples",
    CALIBRATED: "after calibration, on samples",
}


def algorithm_lines(results: Results) -> list[str]:
    """Returns the lines for the terminal; none if no algorithm ran."""
    if results.ran:
        return [f"algorithms, {_ORDER}:", *lined([_RAN_COLUMNS, *map(_ran_cells, results.ran)])]
    return _contest_lines(results.algorithms, results.task) if results.algorithms else []


def algorithms_section(results: Results) -> str:
    """Returns the section of the page; "" if no algorithm ran."""
    if results.ran:
        note = f'<p class="soft">The algorithms {_ORDER}.</p>'
        rows = [("", _on_page(_ran_cells(one), (0, 1))) for one in results.ran]
        return section("Algorithms", note, table(_RAN_COLUMNS, rows))
    return _contest(results) if results.algorithms else ""


def _ran_cells(ran: Ran) -> tuple[str, ...]:
    changed = counted(ran.changed, "site") if ran.changed else "nothing"
    return ran.name, _WHEN[ran.stage], changed, f"{ran.seconds:.1f}" if ran.seconds >= 0.1 else "< 0.1"


def _on_page(cells: Sequence[str], left: Sequence[int]) -> list[str]:
    """Returns the cells as HTML, those at the places `left` left-aligned."""
    shown = map(escape, cells)
    return [f'<td class="left">{cell}</td>' if i in left else cell for i, cell in enumerate(shown)]


def _contest(results: Results) -> str:
    rows = [("main" if one.kept else "", _on_page(_tried_cells(one), (0, 5))) for one in results.algorithms]
    kept = ", ".join(one.name for one in results.algorithms[1:] if one.kept) or "none"
    note = (
        f"Kept: {kept}. Each row adds one algorithm to those kept before, as a file in ONNX Runtime on "
        f"{results.algorithms[0].images:,} {results.task.samples} that neither ranges nor algorithms have seen."
    )
    return section(
        "Algorithms", f'<p class="soft">{escape(note)}</p>', table(_tried_columns(results.task), rows)
    )


def _tried_columns(task: TaskNames) -> tuple[str, ...]:
    """Returns the column headings for the comparison of algorithms."""
    return "algorithm", task.main.title, task.same, "SQNR dB", "seconds", ""


def _tried_cells(tried: Tried) -> tuple[str, ...]:
    """Returns the cells of an algorithm in the order of `_tried_columns`."""
    return (
        tried.name,
        figure(tried.score),
        ABSENT if tried.agreement is None else f"{100 * tried.agreement:.2f}",
        figure(tried.sqnr_db, "{:.1f}"),
        figure(tried.seconds, "{:.1f}"),
        tried.why,
    )


def _contest_lines(algorithms: Sequence[Tried], task: TaskNames) -> list[str]:
    """Returns the lines on the comparison of algorithms."""
    return [
        f"algorithms: each added to those kept before it, as files on {algorithms[0].images:,} {task.samples} that "
        "none of them has seen",
        *lined(
            [_tried_columns(task), *map(_tried_cells, algorithms)],
            [False, *(one.kept for one in algorithms)],
            "kept",
        ),
    ]
