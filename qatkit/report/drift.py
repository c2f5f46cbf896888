"""The section of the page on states that are fed back: the file's distance from float after more and more steps."""

from __future__ import annotations

from html import escape

from qatkit.records.results import Results
from qatkit.report.html import section, table
from qatkit.verify.checks.drift import NAME, cells, columns, heading


def drift_section(results: Results) -> str:
    """Returns the section; "" for a model without states."""
    found = results.measured.get(NAME)
    if found is None:
        return ""
    states = ", ".join(f"{output} is {name} of the next step" for name, output in found["states"].items())
    told = f"{heading(found, results.label).removeprefix('drift: ')}; {states}."
    rows = [("", list(map(escape, row))) for row in cells(found)]
    return section("Drift of states", f"<p>{escape(told)}</p>", table(columns(found, results.task), rows))
