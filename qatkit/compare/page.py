"""Writes compare.html: one self-contained page on many runs, with charts, filters and sorting in plain JavaScript.

Python writes the table, which can be read without JavaScript, and the same values as JSON. `compare.js` draws them. It
reads the filters from the page's address (#recipe=..&backend=..), so that a link can lead to a certain view.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from qatkit.compare.text import cells, columns
from qatkit.records.comparison import BROKEN, MET, SHORT, UNFINISHED, Row, cost, front
from qatkit.records.run_files import PAGE_FILE
from qatkit.report.html import chip, section
from qatkit_verify.files import write_text

_KINDS = {MET: "good", SHORT: "bad", UNFINISHED: "warn", BROKEN: "bad"}
_TEXTUAL = frozenset({0, 1, 9})  # indices of columns with text


def write_page(path: Path, rows: Sequence[Row], root: Path) -> None:
    """Writes the page atomically, with links relative to its folder.

    Args:
        path: the path of the page.
        rows: the runs.
        root: the folder to which the folders in the rows are relative.

    Raises:
        OSError: the page cannot be written.
    """
    write_text(
        path, render_page(rows, root.absolute().name, Path(os.path.relpath(root, path.parent)).as_posix())
    )


def render_page(rows: Sequence[Row], title: str, to_root: str = ".") -> str:
    """Returns the page as one HTML document; the same arguments always give the same text.

    Args:
        rows: the runs.
        title: the title of the page.
        to_root: the relative path from the page to the folder to which the folders in the rows are relative.
    """
    ours = resources.files("qatkit.compare")
    css = resources.files("qatkit.report").joinpath("page.css").read_text(encoding="utf-8")
    css += ours.joinpath("compare.css").read_text(encoding="utf-8")
    script = ours.joinpath("compare.js").read_text(encoding="utf-8")
    data = json.dumps([_point(row, to_root) for row in rows]).replace("<", "\\u003c")
    parts = (
        _header(rows, title),
        _filters(rows),
        _front(rows),
        section("Runs", _table(rows, to_root)),
        _told(rows, to_root),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Runs in {escape(title)}</title><style>\n{css}</style></head><body><main>\n"
        + "\n".join(filter(None, parts))
        + f'\n</main><script type="application/json" id="rows">{data}</script>\n'
        f"<script>\n{script}</script></body></html>\n"
    )


def _header(rows: Sequence[Row], title: str) -> str:
    counts = Counter(row.state for row in rows)
    badges = "".join(
        f'<span class="badge {kind}">{counts[state]} {escape(state)}</span>'
        for state, kind in _KINDS.items()
        if counts[state]
    )
    runs = f"{len(rows)} run{'' if len(rows) == 1 else 's'}"
    return f'<header><h1>Runs in {escape(title)}</h1>{badges}</header><p class="soft">{runs}</p>'


def _filters(rows: Sequence[Row]) -> str:
    """Returns a drop-down list for each property in which the rows differ; "" if there is none."""
    kinds = {
        "recipe": [row.recipe for row in rows],
        "backend": [row.backend for row in rows],
        "on": [row.measured_on for row in rows],
        "state": [row.state for row in rows],
    }
    labels = {"recipe": "Recipe", "backend": "Backend", "on": "Measured on", "state": "State"}
    chosen = "".join(
        f'<label>{labels[kind]}<select data-filter="{kind}"><option value="">all</option>'
        f"{_options(values)}</select></label>"
        for kind, values in kinds.items()
        if len(set(values)) > 1
    )
    return f'<form class="filters">{chosen}<output></output></form>' if chosen else ""


def _options(values: Sequence[str]) -> str:
    return "".join(
        f'<option value="{escape(value)}">{escape(value)} ({count})</option>'
        for value, count in sorted(Counter(values).items())
        if value
    )


def _front(rows: Sequence[Row]) -> str:
    if not any(front(rows)):
        return ""
    said = (
        "Filled points are on the Pareto front of accuracy, latency and size, among the shown runs that were measured "
        "on the same data and machine and meet their bounds. Rings are other runs, and crosses miss a bound. Each "
        "point links to its report."
    )
    shares = all(row.task.main.unit == "%" for row in rows)
    metric = "Accuracy, %" if shares else columns(rows)[2]
    drawn = "".join(
        f'<figure><figcaption class="soft">{label}</figcaption>'
        f'<svg class="scatter" data-x="{key}" role="img"></svg></figure>'
        for key, label in (
            ("ms", f"{escape(metric)}, over latency, ms"),
            ("mb", f"{escape(metric)}, over size, MB"),
        )
    )
    return section("Accuracy, latency, size", f'<p class="soft small">{said}</p><div class="cols">{drawn}</div>',
                   '<p class="legend" id="legend"></p>')  # fmt: skip


def _point(row: Row, to_root: str) -> dict[str, object]:
    """Returns the values of a run that the script reads."""
    return {
        "recipe": row.recipe,
        "backend": row.backend,
        "on": row.measured_on,
        "state": row.state,
        "folder": row.folder,
        "href": _href(row, to_root),
        "acc": row.accuracy,
        "cost": cost(row),
        "unit": "%" if row.score is None else row.task.main.unit,
        "ms": row.latency_ms,
        "mb": None if row.bytes is None else row.bytes / 1e6,
    }


def _href(row: Row, to_root: str) -> str:
    """Returns the link to the run's report, or to its folder if there is none."""
    place = "/".join(part for part in (to_root, row.folder) if part != ".") or "."
    return quote(f"{place}/{PAGE_FILE}" if row.page else f"{place}/")


def _table(rows: Sequence[Row], to_root: str) -> str:
    head = "".join(
        f'<th class="{"left" if i in _TEXTUAL else ""}"><button type="button">{escape(name)}</button></th>'
        for i, name in enumerate(("run", *columns(rows)[1:-1]))
    )
    body = "".join(f"<tr>{_cells(row, to_root)}</tr>\n" for row in rows)
    drawn = f'<table class="dense runs"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>'
    return f'<div class="scroll">{drawn}</div>'


def _cells(row: Row, to_root: str) -> str:
    figures = (row.score, row.drop, row.same, row.latency_ms, row.ratio, row.bytes, row.size_ratio)
    shown = cells(row)
    folder = f'<div class="soft small">{escape(row.folder)}</div>'
    drawn = [
        f'<td class="left run">{_link(row, to_root, shown[0])}{folder}</td>',
        f'<td class="left">{escape(shown[1])}</td>',
    ]
    drawn += [
        f'<td data-v="{"" if value is None else repr(value)}">{escape(one)}</td>'
        for value, one in zip(figures, shown[2:9], strict=True)
    ]
    return "".join(drawn) + f'<td class="left">{chip(_KINDS[row.state], row.state)}</td>'


def _link(row: Row, to_root: str, text: str) -> str:
    return f'<a href="{escape(_href(row, to_root))}">{escape(text)}</a>'


def _told(rows: Sequence[Row], to_root: str) -> str:
    """Returns the list of runs that miss a bound, are unfinished or are broken, with the reasons."""
    items = "".join(
        f"<li>{chip(_KINDS[row.state], row.state)} {_link(row, to_root, row.folder)}"
        f'<div class="soft small">{escape(row.why)}</div></li>'
        for row in rows
        if row.why
    )
    return section("Bounds missed, unfinished, broken", f'<ul class="told">{items}</ul>') if items else ""
