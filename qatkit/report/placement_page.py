"""A measured placement on the page: the files that competed, and what is another in the chosen one, site by site."""

from __future__ import annotations

from html import escape

from qatkit.records.results import Results
from qatkit.report.html import section, table
from qatkit.report.placement_text import COLUMNS, cells, dearest, told


def placement_section(results: Results) -> str:
    """The section; "" where nothing was measured."""
    placed = results.placement
    if placed is None:
        return ""
    rows = [("main" if "(chosen)" in row[0] else "", _row(row)) for row in cells(placed)]
    sites = [
        (
            "",
            [
                f'<td class="left">{escape(site)}</td>',
                "float" if site in placed.sites.floats else "int8",
                f"{ms:+.3f}",
            ],
        )
        for site, ms in dearest(placed)
    ]
    listed = table(("operator", "is", "as in the table, ms"), sites, "dense") if sites else ""
    return section(
        "Placement",
        f'<p class="soft">{escape(told(placed))}.</p>',
        table(COLUMNS, rows, "dense"),
        f"<details><summary>{len(sites)} operators that are another than in the backend's table, and what each alone"
        f" is predicted to take more as there</summary>{listed}</details>"
        if sites
        else "",
    )


def _row(row: tuple[str, ...]) -> list[str]:
    return [f'<td class="left">{escape(row[0])}</td>', *map(escape, row[1:])]
