"""Compares the runs below a folder: prints a table of them, and writes a page.

The exit status is 0, or 2 if the folder or the page cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from qatkit.compare.find import in_order, row_of, runs_below
from qatkit.compare.page import write_page
from qatkit.compare.text import plain_table
from qatkit.records.comparison import Row
from qatkit.run import streams
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import not_writable

COMPARISON_FILE = "compare.html"


def main(typed: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    streams.prepare()
    parser = argparse.ArgumentParser("compare.py", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("outputs"),
        help="folder of runs, at any depth (default: outputs)",
    )
    parser.add_argument("--output", type=Path, help=f"the page to write (default: FOLDER/{COMPARISON_FILE})")
    given = parser.parse_args(typed)
    page = given.output or given.folder / COMPARISON_FILE
    try:
        _check(given.folder, page)
        rows = runs_below(given.folder)
        if not rows:
            allowed = "a folder that contains runs at any depth (folders with a report.json or a config.yaml)"
            raise ConfigError("folder", given.folder, allowed)
        show(rows, given.folder, page)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def page_of(folders: Sequence[Path], page: Path) -> None:
    """Writes the page for the runs in `folders` at the end of a sweep; none if no folder contains a run."""
    rows = in_order([row for folder in folders if (row := row_of(folder, page.parent)) is not None])
    if rows:
        write_page(page, rows, page.parent)
        print(f"{page}: the runs with charts, filters and links to each report")


def show(rows: Sequence[Row], root: Path, page: Path) -> None:
    """Prints the table and writes the page.

    Args:
        rows: the runs.
        root: the folder to which the folders in the rows are relative.
        page: the path of the page.
    """
    write_page(page, rows, root)
    print(plain_table(rows), end="")
    print(f"{page}: the same with charts, filters and links to each report")


def _check(folder: Path, page: Path) -> None:
    if not folder.is_dir():
        raise ConfigError("folder", folder, "a folder of runs, such as outputs")
    if page.is_dir():
        raise ConfigError("--output", page, "the path of a file; this is a folder")
    if reason := not_writable(page.parent):
        raise ConfigError("--output", page, f"a file in a folder that can be written to ({reason})")
