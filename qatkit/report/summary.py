"""The words and figures of a report, formatted once for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from qatkit.records.results import Results
from qatkit.records.tried import Candidate
from qatkit_verify.classification import NAMES
from qatkit_verify.errors import counted
from qatkit_verify.records import TaskNames
from qatkit_verify.table import drawn

_COSTS = ("latency ms [p10-p90]", "speed-up", "size MB", "size ratio")
ABSENT = "-"


def figure(value: float | None, form: str = "{:.2f}") -> str:
    """Returns a figure as text, or a dash for one that was not measured."""
    return ABSENT if value is None else form.format(value)


def columns(results: Results) -> tuple[str, ...]:
    """Returns the column headings of the table; without labels, figures of agreement with float replace accuracy."""
    metrics = tuple(metric.title for metric in results.task.metrics)
    return ("", *(metrics if results.labelled else nearness_columns(results.task)), *_COSTS)


def nearness_columns(task: TaskNames) -> tuple[str, ...]:
    """Returns the column headings of the figures that replace the metrics if there are no labels."""
    return task.same, "KL", "SQNR dB"


def table_cells(results: Results) -> list[tuple[str, ...]]:
    """Returns one tuple of cells per row, in the order of `columns`; "-" stands for a figure that was not measured."""
    return [(label, *_cells(results, key)) for key, label in results.rows]


def _cells(results: Results, key: str) -> tuple[str, ...]:
    latency, size = results.latency.get(key), results.sizes.get(key)
    reference = results.sizes.get("float")
    return (
        *(_accuracy_cells(results, key) if results.labelled else _fidelity_cells(results, key)),
        f"{latency.median_ms:.2f} [{latency.p10_ms:.2f}-{latency.p90_ms:.2f}]" if latency else ABSENT,
        latency.speed if latency else ABSENT,
        f"{size / 1e6:.2f}" if size is not None else ABSENT,
        f"{size / reference:.3f}" if size is not None and reference else ABSENT,
    )


def _accuracy_cells(results: Results, key: str) -> tuple[str, ...]:
    found = results.accuracy.get(key)
    metrics = results.task.metrics if found is None else found.metrics
    return tuple(figure(one.value) for one in metrics)


def _fidelity_cells(results: Results, key: str) -> tuple[str, str, str]:
    found = results.fidelity.get(key)
    if found is None:
        return (ABSENT,) * 3
    decibel = "equal" if found.sqnr_db is None else f"{found.sqnr_db:.1f}"
    return f"{100 * found.agreement:.2f}", figure(found.kl, "{:.2e}"), decibel


def conditions(results: Results) -> str:
    """Returns the conditions of the accuracy and latency measurements in one line."""
    parts = []
    if results.accuracy:
        images = sorted({accuracy.images for accuracy in results.accuracy.values()})
        parts.append(f"accuracy on {' / '.join(f'{count:,}' for count in images)} {results.task.samples}")
    if not results.labelled and results.fidelity:
        compared = next(iter(results.fidelity.values()))
        parts.append(
            f"outputs against the float file's on {compared.images:,} {results.task.samples} without labels"
        )
    if results.latency:
        latency = next(iter(results.latency.values()))
        threads, rounds = counted(latency.threads, "thread"), counted(latency.runs, "interleaved round")
        parts.append(f"latency: batch {latency.batch}, {threads}, median of {rounds}")
    if results.hardware is not None:
        parts.append(results.hardware.cpu)
    return "; ".join(parts)


def candidate_columns(task: TaskNames) -> tuple[str, ...]:
    """Returns the column headings for the comparison of calibration methods."""
    return "method", "output error", task.main.title, f"{task.outputs.removesuffix('s')} error"


def candidate_cells(candidate: Candidate) -> tuple[str, ...]:
    """Returns the cells of a candidate in the order of `candidate_columns`."""
    return (
        candidate.method,
        f"{candidate.output_error:.2e}",
        figure(candidate.score),
        figure(candidate.logit_error, "{:.2e}"),
    )


def calibration_lines(candidates: Sequence[Candidate], task: TaskNames = NAMES) -> list[str]:
    """Returns the lines on the comparison of calibration methods."""
    return [
        f"calibration: methods compared as files on {candidates[0].images:,} {task.samples} that none of them has seen",
        *lined(
            [candidate_columns(task), *map(candidate_cells, candidates)],
            [False, *(candidate.chosen for candidate in candidates)],
            "chosen",
        ),
    ]


def lined(rows: Sequence[tuple[str, ...]], marked: Sequence[bool] = (), mark: str = "") -> list[str]:
    """Returns rows of cells as aligned lines; a line ends in `mark` if its entry in `marked` is true."""
    lines = zip_longest(drawn(rows), marked, fillvalue=False)
    return [f"  {line}" + (f"  <- {mark}" if chosen else "") for line, chosen in lines]
