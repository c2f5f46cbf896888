"""A measured placement, on the terminal and on the page.

The page shows all timed files, and the operators for which the chosen file differs from the backend's table.
"""

from __future__ import annotations

from html import escape

from qatkit.records.results import Results
from qatkit.report.html import section, table
from qatkit.report.precision import named
from qatkit_verify.errors import counted
from qatkit_verify.placement.record import FLOAT, TABLE, Placed

COLUMNS = (
    "file",
    "float operators",
    "SiLUs in int8",
    "predicted ms",
    "ms",
    "speed-up over table [sessions]",
    "over float",
)
_NAMES = {TABLE: "backend's table", "opened": "all SiLUs in int8", "even": "every other operator in float"}


def cells(placed: Placed) -> list[tuple[str, ...]]:
    """Returns the cells of each file in the order of `COLUMNS`, the fastest first."""
    ms = placed.of(FLOAT).ms
    return [
        (
            _NAMES.get(one.name, one.name) + (" (chosen)" if one.name == placed.chosen else ""),
            "all" if one.name == FLOAT else str(one.floats),
            str(one.opened),
            "-" if one.predicted_ms is None else f"{one.predicted_ms:.3f}",
            f"{one.ms:.3f}",
            f"{one.ratio:.2f} [{one.low:.2f}-{one.high:.2f}]",
            f"{ms / one.ms:.2f}",
        )
        for one in sorted(placed.files, key=lambda one: one.ms)
    ]


def chosen_line(placed: Placed) -> str:
    """Returns a line on the chosen file and the certainty of the choice."""
    machine, best, sites = placed.machine, placed.of(placed.chosen), placed.sites
    parts = [f"{counted(len(sites.floats), 'operator')} in float"] if sites.floats else []
    parts += [f"{counted(len(sites.opened), 'SiLU')} in int8"] if sites.opened else []
    parts += ["weights stored for AMX"] if sites.for_amx else []
    what = " and ".join(parts) + ", unlike the backend's table" if parts else "the backend's table is kept"
    predicted = "" if best.predicted_ms is None else f" (predicted {best.predicted_ms:.3f})"
    table = "" if placed.chosen == TABLE else f"the table {placed.of(TABLE).ms:.3f} ms, "
    others = f"{table}float {placed.of(FLOAT).ms:.3f} ms"
    noise = f"{100 * placed.noise:.1f} %"
    count = counted(sum(one.name != FLOAT for one in placed.files), "quantized file")
    files = f"no clearly faster one among {count}" if placed.chosen == TABLE else f"the fastest of {count}"
    files += f", timed in alternation (ratios vary by {noise} between sessions)"
    threads = counted(machine.threads, "thread")
    where = f"{machine.cpu}, {threads}, batch {machine.batch}, ONNX Runtime {machine.onnxruntime}"
    return f"{what}: {best.ms:.3f} ms{predicted}, {others}; {files}; {where}"


def dearest(placed: Placed) -> list[tuple[str, float]]:
    """Returns the operators for which the chosen file differs from the backend's table.

    Each has the predicted milliseconds by which the file would become slower if the operator were as in the
    table; the largest number is first.
    Returns [] if nothing was predicted, as by `qatkit-measure`.
    """
    return sorted(placed.costs.items(), key=lambda pair: -pair[1])


def lines(results: Results) -> list[str]:
    """Returns the lines for the terminal."""
    placed = results.placement
    if placed is None:
        return []
    found = [f"placement: {chosen_line(placed)}"]
    if placed.sites.floats:
        found.append(
            f"  float: {named([name for name, _ in dearest(placed) if name in placed.sites.floats])}"
        )
    if placed.sites.opened:
        found.append(f"  SiLU in int8: {named(sorted(placed.sites.opened))}")
    return found


def placement_section(results: Results) -> str:
    """Returns the section; "" if nothing was measured."""
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
    listed = table(("operator", "precision", "extra ms as in the table"), sites, "dense") if sites else ""
    return section(
        "Placement",
        f'<p class="soft">{escape(chosen_line(placed))}.</p>',
        table(COLUMNS, rows, "dense"),
        f"<details><summary>{counted(len(sites), 'operator')} placed differently from the backend's table, with the "
        f"predicted extra time if the operator were placed as in the table</summary>{listed}</details>"
        if sites
        else "",
    )


def _row(row: tuple[str, ...]) -> list[str]:
    return [f'<td class="left">{escape(row[0])}</td>', *map(escape, row[1:])]
