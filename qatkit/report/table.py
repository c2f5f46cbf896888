"""The report of a run on the terminal: a table, remarks on it, and the paths of the files.

On a terminal the table is drawn by rich. In a pipe or a log it is plain ASCII, identical for the same
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qatkit.records.fixes import either
from qatkit.records.results import Results
from qatkit.report import curve, placement, precision
from qatkit.report.algorithms import algorithm_lines
from qatkit.report.analysis_text import analysis_lines
from qatkit.report.ladder import ladder_lines
from qatkit.report.summary import calibration_lines, columns, conditions, table_cells
from qatkit.verify.checks.base import Check, capped, default_checks
from qatkit_verify.table import drawn


def print_report(
    results: Results, console: Console | None = None, checks: Sequence[Check] | None = None
) -> None:
    """Prints the report: coloured on a terminal, `plain_report` elsewhere.

    Args:
        results: the results of the run.
        console: the console to print to; by default standard output.
        checks: the checks whose lines are shown; by default those of the default configuration.
    """
    console = console or Console()
    if not console.is_terminal:
        console.file.write(plain_report(results, checks))
        return
    table = Table(
        title=f"{results.name}: {results.model}", caption=conditions(results), caption_justify="left"
    )
    for column in columns(results):
        table.add_column(escape(column), justify="right" if column else "left", no_wrap=True)
    for cells in table_cells(results):
        table.add_row(*(escape(cell) for cell in cells), style="bold" if "ONNX" in cells[0] else None)
    console.print(table)
    for style, line in _lines(results, checks):
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def plain_report(results: Results, checks: Sequence[Check] | None = None) -> str:
    """Returns the report of `print_report` as ASCII text with one trailing newline."""
    rows = [columns(results), *table_cells(results)]
    first, *others = drawn(rows, figures=True)
    rule = "-" * (sum(max(map(len, column)) + 2 for column in zip(*rows, strict=True)) - 2)
    head = [f"{results.name}: {results.model}", "", first, rule, *others, rule]
    lines = [*head, *filter(None, [conditions(results)]), *(line for _, line in _lines(results, checks))]
    return "\n".join(lines).encode("ascii", "replace").decode() + "\n"


def _lines(results: Results, checks: Sequence[Check] | None) -> list[tuple[str | None, str]]:
    """Returns (style, line) for everything below the table."""
    lines: list[tuple[str | None, str]] = []
    if results.calibration:
        lines += [(None, line) for line in calibration_lines(results.calibration, results.task)]
    said = (
        *algorithm_lines(results),
        *curve.lines(results),
        *placement.lines(results),
        *precision.lines(results),
        *analysis_lines(results),
    )
    lines += [(None, line) for line in said]
    for check in default_checks() if checks is None else checks:
        lines += [
            ("red" if line.lstrip().startswith("problem: ") else None, line) for line in check.lines(results)
        ]
    lines += [("yellow", f"note: {note}") for note in results.notes]
    skipped = [f"{site}: {reason}" for site, reason in results.skipped]
    lines += [("yellow", line) for line in capped("skipped: ", skipped)]
    for line, fix in zip_longest(results.shortfalls, map(either, results.fixes), fillvalue=""):
        lines.append(("bold red", f"SHORTFALL {line}"))
        if fix:
            lines.append((None, f"  to fix it: {fix}"))
    if not results.shortfalls and (results.audit is not None or results.accuracy):
        lines.append(("green", "all `verify` bounds are met"))
    if results.ladder is not None:
        lines += [(None, line) for line in ladder_lines(results.ladder)]
    if results.output_dir:  # the first export has no output folder
        lines.append(("bold", f"output folder: {results.output_dir}"))
    if not results.next and results.climb:
        lines.append(("bold", f"to try one remedy after the other: {results.climb}"))
    return lines
