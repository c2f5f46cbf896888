"""A table of many runs: the runs of a sweep, or the trials of a search."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qatkit.records.figures import Figures, figures_of
from qatkit.records.run_files import report_of
from qatkit.report.summary import figure
from qatkit_verify.classification import names_of
from qatkit_verify.errors import counted
from qatkit_verify.table import drawn

STATUS = {0: "done", 1: "falls short"}


class Ended(Protocol):
    """The fields of a sweep's run that are reported (`qatkit.config.sweep.Outcome`)."""

    @property
    def status(self) -> int: ...
    @property
    def folder(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def number(self) -> int | None: ...
    @property
    def overrides(self) -> Sequence[str]: ...
    @property
    def going(self) -> str: ...


def print_runs(runs: Sequence[Ended]) -> None:
    """Prints the runs of a sweep as a table on standard output: overrides, results and folder of each."""
    if not runs:
        return
    shared = set(runs[0].overrides).intersection(*(run.overrides for run in runs)) if len(runs) > 1 else set()
    rows = [_row(run, shared) for run in sorted(runs, key=lambda run: run.number or 0)]
    print_table(
        f"sweep of {counted(len(rows), 'run')}",
        ("run", _score_name(runs), "ms", "MB", "status", "folder"),
        rows,
    )


def _row(run: Ended, shared: set[str]) -> list[str]:
    report = report_of(Path(run.folder)) if run.folder else None
    found = Figures() if report is None else figures_of(report)
    shortfalls = report["shortfalls"] if report else []
    why = run.reason or (shortfalls[0] if run.status == 1 and shortfalls else "")
    ended = "failed" if run.reason else STATUS.get(run.status, "failed")
    return [
        " ".join(one for one in run.overrides if one not in shared) or "-",
        figure(found.score),
        figure(found.latency_ms, "{:.3f}"),
        figure(None if found.bytes is None else found.bytes / 1e6),
        run.going or ended + (f": {why}" if why else ""),
        run.folder or "-",
    ]


def _score_name(runs: Sequence[Ended]) -> str:
    """Returns the name of the metric of the first run with a report, since a sweep has one task."""
    reports = (report_of(Path(run.folder)) for run in runs if run.folder)
    return names_of(next((one for one in reports if one is not None), {})).main.name


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a drawn table on a terminal, and a plain one elsewhere."""
    console = Console()
    if not console.is_terminal:
        sys.stdout.write(plain_table(title, head, rows))
        sys.stdout.flush()
        return
    table = Table(title=title)
    for column in head:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def plain_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the table in ASCII, one line per row."""
    first, *others = drawn([head, *rows])
    rule = "-" * max(map(len, (first, *others)))
    lines = [title, "", first, rule, *others]
    return "\n".join(lines).encode("ascii", "replace").decode() + "\n"
