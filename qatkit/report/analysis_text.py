"""Describes an analysis of the loss by quantization as text, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from qatkit.records.analysis import (
    ALL_BUT,
    BY_ACTIVATIONS,
    BY_WEIGHTS,
    ONLY,
    Analysis,
    ClassRow,
    Outcome,
    SensitivityRow,
)
from qatkit.records.fixes import Fix, either
from qatkit.records.results import Results
from qatkit.verify.checks.requested import RequestedSettings, float_fix
from qatkit_verify.errors import counted
from qatkit_verify.records import TaskNames
from qatkit_verify.table import drawn

SIDES = (
    ("float", "float"),
    ("weights", "weights quantized"),
    ("activations", "activations quantized"),
    ("both", "both, simulated"),
    ("int8", "INT8, ONNX Runtime"),
)
_SHOWN = 8  # number of sites on the terminal
_CLASSES = 3
# Loss of weights and activations together below which there is nothing to fix.
_POINTS, _AGREEMENT = 0.1, 0.995


def decibels(value: float | None) -> str:
    """Returns an SQNR as text; None means no difference at all."""
    return "equal" if value is None else f"{value:.1f}"


def side_columns(labelled: bool, task: TaskNames) -> tuple[str, ...]:
    """Returns the column headings of the table that compares the loss by weights and by activations."""
    return ("", *((task.main.title,) if labelled else ()), "same as float %", "KL", "SQNR dB")


def side_cells(label: str, found: Outcome, labelled: bool) -> tuple[str, ...]:
    """Returns the cells of a row in the order of `side_columns`."""
    score = (("-" if found.score is None else f"{found.score:.2f}"),) if labelled else ()
    return (label, *score, f"{100 * found.agreement:.2f}", f"{found.loss:.2e}", decibels(found.sqnr))


def site_columns(labelled: bool, task: TaskNames) -> tuple[str, ...]:
    """Returns the column headings of a sensitivity table."""
    return ("weight or activation", *((task.main.title,) if labelled else ()), "KL", "SQNR dB")


def site_cells(row: SensitivityRow, labelled: bool) -> tuple[str, ...]:
    """Returns the cells of a row in the order of `site_columns`; an estimate has only the loss."""
    score = (("-" if row.score is None else f"{row.score:.2f}"),) if labelled else ()
    return (f"{row.kind} {row.site}", *score, f"{row.loss:.2e}", decibels(row.sqnr) if row.exact else "-")


def rows_of(found: Analysis, direction: str) -> list[SensitivityRow]:
    """Returns the rows of a direction; if nothing was measured, the estimated ones.

    For ONLY (a single weight or activation is quantized), the row with the largest loss is first. For ALL_BUT
    (a single one is in float), it is the row with the smallest loss.
    """
    chosen = [row for row in found.sensitivity or found.estimate if row.direction == direction]
    return sorted(chosen, key=lambda row: row.loss, reverse=direction == ONLY)


def titles(found: Analysis) -> dict[str, str]:
    """Returns the title of the rows of each direction."""
    how = "measured" if found.sensitivity else "estimated"
    return {
        ONLY: f"only one site quantized, the most sensitive first ({how})",
        ALL_BUT: "only one site in float, the most helpful first",
    }


def class_text(row: ClassRow) -> str:
    """Returns the accuracy of a class in float and quantized, as text."""
    return f"{row.name} {row.float_score:.1f} -> {row.score:.1f} %"


def worst_classes(rows: Sequence[ClassRow], count: int = _CLASSES) -> list[ClassRow]:
    """Returns the classes with the largest losses, at most `count`."""
    return [row for row in rows if row.lost > 0][:count]


def advice_line(results: Results) -> str:
    """Returns a line on whether weights or activations lose accuracy, and which settings may reduce the loss.

    If both together lose almost nothing, the line says so and names no settings. It is "" if the two were not
    compared (`Analysis.isolation`).
    """
    found = results.analysis
    if found is None or found.isolation is None:
        return ""
    line, outcomes = found.isolation.advice, found.isolation.outcomes
    exact, both = outcomes["float"], outcomes["both"]
    drop = 0.0 if exact.score is None or both.score is None else exact.score - both.score
    known = exact.score is not None
    if drop < _POINTS if known else both.agreement >= _AGREEMENT:
        return f"{line}; together they lose almost nothing"
    ways = either(_ways(results, found, line))
    return f"{line}; to try: {ways}" if ways else line


def _ways(results: Results, found: Analysis, line: str) -> list[Fix]:
    """Returns settings that this run does not use, and that may reduce the loss named in `line`."""
    asked, ways = RequestedSettings(results), []
    if not line.endswith(BY_ACTIVATIONS) and asked.get("calibration.weights") in ("auto", "max"):
        ways.append(Fix(("calibration.weights=mse",)))
    if not line.endswith(BY_WEIGHTS) and asked.get("calibration.search") == "none":
        ways.append(Fix(("calibration=auto",)))
    if asked.get("algorithm_choice") != "auto":
        ways.append(Fix(("algorithm=auto",)))
    weights = {row.site for row in found.estimate if row.kind == "weight"}
    first = next((row.site for row in rows_of(found, ONLY) if row.site in weights), None)
    return [*ways, *float_fix(first, "keeps the most sensitive layer in float")] if first else ways


def without_labels(results: Results) -> str:
    """Returns a clause that says which figures replace the metric if there are no labels."""
    return f"judged without labels, by agreement with float (same {results.task.decision}), KL and SQNR"


def analysis_lines(results: Results) -> list[str]:
    """Returns the lines on the analysis for the terminal."""
    found = results.analysis
    if found is None:
        return []
    lines = [] if found.labelled else [f"analysis: {without_labels(results)}"]
    lines += _isolation(results, found) + _sensitivity(found, results.task) + _tensors(found, results.task)
    return lines + [f"analysis: {note}" for note in found.notes]


def _isolation(results: Results, found: Analysis) -> list[str]:
    one = found.isolation
    if one is None:
        return []
    table = [side_columns(found.labelled, results.task)]
    table += [side_cells(t, one.outcomes[k], found.labelled) for k, t in SIDES if k in one.outcomes]
    lines = [f"isolation on {counted(one.outcomes['float'].images, results.task.sample)}", *_indented(table)]
    lines.append(f"  {advice_line(results)}")
    worst = worst_classes(one.classes)
    return [*lines, f"  classes that lose most: {', '.join(map(class_text, worst))}"] if worst else lines


def _sensitivity(found: Analysis, task: TaskNames) -> list[str]:
    lines = []
    for direction, title in titles(found).items():
        rows = rows_of(found, direction)
        if rows:
            table = [site_cells(row, found.labelled) for row in rows[:_SHOWN]]
            lines += [f"sensitivity, {title}", *_indented([site_columns(found.labelled, task), *table])]
            lines += [f"  ... and {len(rows) - _SHOWN} more, see report.json"] if len(rows) > _SHOWN else []
    return lines


def _tensors(found: Analysis, task: TaskNames) -> list[str]:
    one = found.comparison
    return (
        []
        if one is None
        else [f"tensors on {counted(one.images, task.sample)}: {line}" for line in tensor_lines(found)]
    )


def tensor_lines(found: Analysis) -> list[str]:
    """Returns the conclusions of the comparison of tensors."""
    one = found.comparison
    if one is None:
        return []
    lines = []
    if one.suspect is not None:
        row = next(r for r in one.rows if f"{r.kind} {r.site}" == one.suspect)
        lines.append(
            f"the scale of {one.suspect} loses {row.avoidable:.1f} dB against a scale from the range of its values"
            f" ({100 * row.clipped:.2g} % clipped, {100 * row.grid:.0f} % of the grid used)"
        )
    else:
        lines.append("no scale has a much larger error than a scale from the range of the values")
    if one.first is not None:
        lines.append(f"ONNX Runtime first differs from the simulation at {one.first}")
    elif any(row.runtime is not None for row in one.rows):
        lines.append("ONNX Runtime agrees with the converted module on every quantized tensor within a step")
    drawn_ones = [row.picture for row in one.rows if row.picture]
    if drawn_ones:
        lines.append(f"histograms ({counted(len(drawn_ones), 'tensor')}): {drawn_ones[0].rpartition('/')[0]}")
    return [*lines, *one.notes]


def _indented(table: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in drawn(table, figures=True)]
