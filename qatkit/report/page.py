"""The page report.html. It is self-contained, so that it can be opened anywhere without network or Python.

Each section is a function from `Results` to HTML and returns "" if its measurement was not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any

from qatkit.records.fixes import either
from qatkit.records.results import Results
from qatkit.report.algorithms import algorithms_section
from qatkit.report.analysis_page import analysis_section
from qatkit.report.bars import charts
from qatkit.report.bias import bias_section
from qatkit.report.curve import curve_section
from qatkit.report.drift import drift_section
from qatkit.report.examples import classes_section, examples_section
from qatkit.report.file_page import audit_section, parity_section
from qatkit.report.html import chip, section, table
from qatkit.report.ladder import ladder_columns, ladder_rows
from qatkit.report.overrides import overrides_section
from qatkit.report.placement import placement_section
from qatkit.report.precision import precision_section
from qatkit.report.run_code import Loading, programs
from qatkit.report.summary import (
    candidate_cells,
    candidate_columns,
    columns,
    conditions,
    table_cells,
)
from qatkit.verify.checks import runtimes
from qatkit.verify.checks.base import Check, default_checks
from qatkit_verify.files import write_text


def write_page(path: str | Path, results: Results, checks: Sequence[Check] | None = None) -> None:
    """Writes the page in an atomic step.

    Raises:
        OSError: the folder is not writable.
    """
    write_text(path, render_page(results, checks))


def render_page(results: Results, checks: Sequence[Check] | None = None) -> str:
    """Returns the page as one HTML document, deterministic for given results.

    Each of `checks` (by default those of the default configuration) has a section, which is defined here or
    consists of the check's lines.
    """
    css = resources.files("qatkit.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = (
        _header(results),
        _tiles(results),
        _shortfalls(results),
        _summary(results),
        classes_section(results),
        _next(results),
        _ladder(results),
        _calibration(results),
        algorithms_section(results),
        curve_section(results),
        placement_section(results),
        precision_section(results),
        analysis_section(results),
        *(_checked(check, results) for check in (default_checks() if checks is None else checks)),
        overrides_section(results),
        _skipped(results),
        _how_to_run(results),
        _provenance(results),
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(results.name)}</title><style>\n{css}</style></head><body><main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main></body></html>\n"
    )


def _header(results: Results) -> str:
    if results.shortfalls:
        count = len(results.shortfalls)
        badge = f'<span class="badge bad">{count} bound{"s" if count > 1 else ""} not met</span>'
    else:
        badge = '<span class="badge good">all bounds met</span>'
    return (
        f"<header><h1>{escape(results.name)}</h1>{badge}</header>"
        f'<p class="soft">{escape(results.model)} as {escape(results.label)} ONNX; {escape(conditions(results))}</p>'
        + "".join(f"<p>{escape(note)}</p>" for note in results.notes)
    )


def _tiles(results: Results) -> str:
    """Returns the tiles with the most important figures of the file, as far as they were measured.

    They are accuracy (without labels, the agreement with float), speed-up, size, parity, and the share of the
    work in int8 (or the bits per packed weight).
    """
    tiles: list[tuple[str, str]] = []
    accuracy, latency, task = results.accuracy, results.latency, results.task
    metric = task.main
    if "int8" in accuracy:
        note = f"{metric.name}, {results.label} in ONNX Runtime"
        if "float" in accuracy:
            change = accuracy["int8"].score - accuracy["float"].score
            note += f" ({change:+.2f} {metric.points} against float)"
        tiles.append((accuracy["int8"].main.text, note))
    if not results.labelled and "int8" in results.fidelity:
        near = results.fidelity["int8"]
        note = f"same {task.decision} as the float file, over {near.images:,} {task.samples} without labels"
        tiles.append((f"{100 * near.agreement:.2f} %", note))
    if "int8" in latency:
        timed = latency["int8"]
        marked = f" {chip('warn', 'noisy')}" if timed.noise else ""
        spread = f"p10-p90 {timed.ratio_p10:.2f}-{timed.ratio_p90:.2f}"
        tiles.append((f"{timed.ratio:.2f}&times;{marked}", f"as fast as float ({spread})"))
    if results.size_ratio is not None:
        tiles.append(
            (
                f"{results.size_ratio:.3f}",
                f"of the float file's size ({results.label}: {results.sizes['int8'] / 1e6:.2f} MB)",
            )
        )
    if results.parity is not None:
        trained, whole = results.parity.against_float is None, results.parity.agreement
        other = "as the converted module" if trained else "with and without optimizations"
        note = f"same {task.alike} {other}"
        tiles.append((f"{100 * whole:.2f} %", note))
    if results.audit is not None and results.audit.packed_bits is not None and not results.audit.int8_macs:
        note = "per weight of products with packed weights, including scales"
        tiles.append((f"{results.audit.packed_bits:.2f} bits", note))
    elif results.audit is not None:
        verb = "run" if results.audit.for_onnxruntime else "are requested"
        tiles.append((f"{100 * results.audit.int8_share:.1f} %", f"of multiply-accumulates {verb} in int8"))
    body = "".join(
        f'<div class="tile"><b>{value}</b><span>{escape(note)}</span></div>' for value, note in tiles
    )
    return f'<div class="tiles">{body}</div>' if tiles else ""


def _shortfalls(results: Results) -> str:
    items = "".join(
        f"<li>{escape(line)}" + (f'<p class="soft">To fix it: {escape(fix)}</p>' if fix else "") + "</li>"
        for line, fix in zip_longest(results.shortfalls, map(either, results.fixes), fillvalue="")
    )
    climb = (
        f"<p>To try one remedy after the other: <code>{escape(results.climb)}</code></p>"
        if results.climb
        else ""
    )
    return section("Bounds not met", f"<ul>{items}</ul>", climb) if items else ""


def _next(results: Results) -> str:
    """Returns the section with suggested commands after the run."""
    items = "".join(
        f'<li><code>{escape(one.command)}</code><p class="soft">{escape(one.why)}</p></li>'
        for one in results.next
    )
    return section("Next", f"<ul>{items}</ul>") if items else ""


def _ladder(results: Results) -> str:
    """Returns the section with the rungs of a rescue; the delivered one is highlighted."""
    ladder = results.ladder
    if ladder is None:
        return ""
    rows = [
        ("main" if row.name == ladder.chosen else "", list(map(escape, cells)))
        for row, cells in zip(ladder.rungs, ladder_rows(ladder), strict=True)
    ]
    said = f'<p class="soft">Target: {escape(ladder.target)}. Every file in ONNX Runtime.</p>'
    return section(
        "Rescue, rung by rung", said, table(ladder_columns(ladder), rows), f"<p>{escape(ladder.advice)}</p>"
    )


def _checked(check: Check, results: Results) -> str:
    """Returns the section of a check that is defined here, or else a section with its lines."""
    if check.name in _SECTIONS:
        return _SECTIONS[check.name](results)
    items = "".join(f"<li>{escape(line.strip())}</li>" for line in check.lines(results))
    return section(check.name.replace("_", " ").capitalize(), f"<ul>{items}</ul>") if items else ""


def _summary(results: Results) -> str:
    rows = [
        ("main" if key == "int8" else "", [escape(cell) for cell in cells])
        for (key, _), cells in zip(results.rows, table_cells(results), strict=True)
    ]
    return section("Summary", table(columns(results), rows), charts(results)) if rows else ""


def _calibration(results: Results) -> str:
    if not results.calibration:
        return ""
    rows = [
        ("main" if one.chosen else "", [f'<td class="left">{escape(cell)}</td>' if not i else cell for i, cell in
         enumerate(candidate_cells(one))])
        for one in results.calibration
    ]  # fmt: skip
    task = results.task
    chosen = next((one.method for one in results.calibration if one.chosen), "none")
    note = (
        f"Chosen: {chosen}, by {results.calibration[0].images:,} {task.samples} that no method has seen. The output "
        "error is the relative squared error of the operators that read each tensor, averaged over tensors; the last "
        f"column is the relative squared error of the file's {task.outputs}. Methods without a figure there had too "
        "large an output error to be tried as files."
    )
    return section("Calibration", f'<p class="soft">{escape(note)}</p>', table(candidate_columns(task), rows))


def _runtimes(results: Results) -> str:
    """Returns the section on the exported file in every runtime, the fastest first."""
    if not results.runtimes:
        return ""
    drawn = [
        ("" if i else "main", [f'<td class="left">{escape(cells[0])}</td>', *map(escape, cells[1:])])
        for i, cells in enumerate(runtimes.rows(results))
    ]
    said = "".join(f"<p>{escape(note)}</p>" for note in runtimes.notes(results))
    return section("Runtimes that read the same file", table(runtimes.columns(results.task), drawn), said)


# Checks with their own section. Checks whose results are in the table at the top have no lines.
_SECTIONS: dict[str, Callable[[Results], str]] = {
    "parity": parity_section,
    "audit": audit_section,
    "runtimes": _runtimes,
    "drift": drift_section,
    "examples": examples_section,
    "bias": bias_section,
}


_SHOWN_SECONDS = 0.05  # shorter stages would be shown as "0.0 s"
# Marks around the programs. A bundle's page replaces the programs with those for its own files.
_PROGRAMS = ("<!-- programs -->", "<!-- /programs -->")


def _skipped(results: Results) -> str:
    rows = [
        ("", [f"<code>{escape(site)}</code>", f'<td class="left">{escape(reason)}</td>'])
        for site, reason in results.skipped
    ]
    return section("Skipped", table(("site", "reason"), rows, "dense")) if rows else ""


def _how_to_run(results: Results) -> str:
    loading = Loading.of_results(results)
    return run_section(loading) if loading is not None else ""


def run_section(loading: Loading) -> str:
    """Returns the section with the programs that run the file, Python first."""
    written = "".join(
        f"<h3>{language}</h3><pre>{escape(code)}</pre>" for language, code in programs(loading).items()
    )
    return f"{_PROGRAMS[0]}{section('How to run it', written)}{_PROGRAMS[1]}"


def for_bundle(page: str, loading: Loading) -> str:
    """Returns a run's page with its programs replaced by those for a bundle; a page without programs is unchanged."""
    start, end = (page.find(mark) for mark in _PROGRAMS)
    return page if start < 0 else page[:start] + run_section(loading) + page[end + len(_PROGRAMS[1]) :]


def _provenance(results: Results) -> str:
    facts: list[tuple[str, str]] = list(results.versions.items())
    if results.hardware is not None:
        machine = results.hardware
        isa = ", ".join(machine.isa) or "unknown instruction sets"
        facts.insert(0, ("hardware", f"{machine.cpu}, {machine.cores} cores, {isa}; {machine.system}"))
    estimates = {one.stage: one.estimate for one in results.plan if one.estimate is not None}
    facts += [
        (
            f"time: {stage.replace('_', ' ')}",
            f"{seconds:.1f} s" + (f", estimated {estimates[stage]:.1f} s" if stage in estimates else ""),
        )
        for stage, seconds in results.timings.items()
        if seconds >= _SHOWN_SECONDS
    ]
    rows = [("", [escape(name), f'<td class="left">{escape(value)}</td>']) for name, value in facts]
    files = [
        ("", [f"<code>{escape(file.name)}</code>", f"{file.bytes:,}", f"<code>{file.sha256}</code>"])
        for file in results.files
    ]
    parts = [table(("what", ""), rows, "dense")] if rows else []
    if files:
        parts.append("<h3>Files</h3>" + table(("file", "bytes", "sha256"), files, "dense"))
    if results.config:
        text = escape("\n".join(_config_lines(results.config)))
        parts.append(
            f"<h3>Configuration</h3><details><summary>Every key</summary><pre>{text}</pre></details>"
        )
    return section("Provenance", *parts) if parts else ""


def _config_lines(value: Any, prefix: str = "") -> list[str]:
    """Returns a line `key.path=value` for each setting."""
    if isinstance(value, dict) and value:
        return [
            line for key, item in value.items() for line in _config_lines(item, f"{prefix}.{key}".lstrip("."))
        ]
    return [f"{prefix}={'null' if value is None else value}"]
