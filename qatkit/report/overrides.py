"""The section of the page on the operators and tensors that each selector of the overrides chose."""

from __future__ import annotations

from html import escape
from typing import Any

from qatkit.records.results import Results
from qatkit.report.html import section, table

_LISTED = 20


def overrides_section(results: Results) -> str:
    """Returns the section, with the settings of each selector and the number and names of what it selected.

    It is "" if there are no overrides.
    """
    matched = results.measured.get("overrides", {}).get("matched", [])
    rows = [("", [_left(f"<code>{escape(one['selector'])}</code>"), *_cells(one)]) for one in matched]
    return (
        section("Overrides", table(("selector", "settings", "matched", "names"), rows, "dense"))
        if rows
        else ""
    )


def _cells(one: dict[str, Any]) -> list[str]:
    settings = ", ".join(f"{name}: {value}" for name, value in one["settings"].items())
    names, rest = one["names"][:_LISTED], max(0, one["count"] - _LISTED)
    listed = ", ".join(map(escape, names)) + (f" and {rest} more" if rest else "")
    return [_left(escape(settings)), f"{one['count']}", _left(listed)]


def _left(cell: str) -> str:
    return f'<td class="left">{cell}</td>'
