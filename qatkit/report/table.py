"""The end of a run on the terminal: one table, then what to know about it, then where the files are.

On a terminal the table is drawn by rich; piped into a file or a log it is plain ASCII, the same bytes for the
same results.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qatkit.report.summary import (
    COLUMNS,
    audit_line,
    calibration_lines,
    conditions,
    divergence_line,
    parity_lines,
    table_cells,
)
from qatkit.verify.results import Results

_SHOWN = 10  # problems and skipped sites printed before "and N more"


def print_report(results: Results, console: Console | None = None) -> None:
    """Prints the report: coloured on a terminal, `plain_report` elsewhere."""
    console = console or Console()
    if not console.is_terminal:
        console.file.write(plain_report(results))
        return
    table = Table(
        title=f"{results.name}: {results.model}", caption=conditions(results), caption_justify="left"
    )
    for column in COLUMNS:
        table.add_column(escape(column), justify="right" if column else "left", no_wrap=True)
    for cells in table_cells(results):
        table.add_row(*(escape(cell) for cell in cells), style="bold" if "ONNX" in cells[0] else None)
    console.print(table)
    for style, line in _lines(results):
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def plain_report(results: Results) -> str:
    """The same report as ASCII text, one trailing newline."""
    rows = [COLUMNS, *table_cells(results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    drawn = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    head = [f"{results.name}: {results.model}", "", drawn[0], rule, *drawn[1:], rule]
    lines = [*head, *filter(None, [conditions(results)]), *(line for _, line in _lines(results))]
    return "\n".join(lines).encode("ascii", "replace").decode() + "\n"


def _lines(results: Results) -> list[tuple[str | None, str]]:
    """(style, line) for everything under the table."""
    lines: list[tuple[str | None, str]] = []
    if results.calibration:
        lines += [(None, line) for line in calibration_lines(results.calibration)]
    if results.parity is not None:
        lines += [(None, line) for line in parity_lines(results.parity)]
    if results.divergence is not None:
        lines.append((None, divergence_line(results.divergence)))
    if results.audit is not None:
        lines.append((None if results.audit.ok else "red", audit_line(results.audit)))
        lines += [("red", line) for line in _capped("problem: ", results.audit.problems)]
    lines += [("yellow", f"note: {note}") for note in results.notes]
    skipped = [f"{site}: {reason}" for site, reason in results.skipped]
    lines += [("yellow", line) for line in _capped("skipped: ", skipped)]
    if results.shortfalls:
        lines += [("bold red", f"SHORTFALL {line}") for line in results.shortfalls]
    elif results.audit is not None or results.accuracy:
        lines.append(("green", "every bound of `verify` is kept"))
    lines.append(("bold", f"output folder: {results.output_dir}"))
    return lines


def _capped(title: str, items: tuple[str, ...] | list[str]) -> list[str]:
    shown = [f"  {title}{item}" for item in items[:_SHOWN]]
    more = len(items) - len(shown)
    return [*shown, f"  ... and {more} more, see report.json"] if more else shown
