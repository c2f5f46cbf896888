"""The words and figures of a report, formatted once for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from qatkit.records.results import Results
from qatkit.records.tried import Candidate, Tried
from qatkit_verify.table import drawn

COLUMNS = ("", "top-1 %", "top-5 %", "latency ms [p10-p90]", "speed-up", "size MB", "size ratio")
_UNLABELLED = ("same top-1 %", "KL", "SQNR dB")  # in place of the top-1 and top-5 of COLUMNS
ABSENT = "-"


def columns(results: Results) -> tuple[str, ...]:
    """The heads of the table: without labels, nearness to the float file stands in for accuracy."""
    return COLUMNS if results.labelled else ("", *_UNLABELLED, *COLUMNS[3:])


def table_cells(results: Results) -> list[tuple[str, ...]]:
    """One tuple of cells a row, as `columns`; a figure that was not measured is "-"."""
    return [(label, *_cells(results, key)) for key, label in results.rows]


def _cells(results: Results, key: str) -> tuple[str, ...]:
    latency, size = results.latency.get(key), results.sizes.get(key)
    reference = results.sizes.get("float")
    return (
        *(_accuracy_cells(results, key) if results.labelled else _fidelity_cells(results, key)),
        f"{latency.median_ms:.2f} [{latency.p10_ms:.2f}-{latency.p90_ms:.2f}]" if latency else ABSENT,
        f"{latency.ratio:.2f}x" if latency else ABSENT,
        f"{size / 1e6:.2f}" if size is not None else ABSENT,
        f"{size / reference:.3f}" if size is not None and reference else ABSENT,
    )


def _accuracy_cells(results: Results, key: str) -> tuple[str, str]:
    accuracy = results.accuracy.get(key)
    return (
        f"{accuracy.top1:.2f}" if accuracy else ABSENT,
        f"{accuracy.top5:.2f}" if accuracy and accuracy.top5 is not None else ABSENT,
    )


def _fidelity_cells(results: Results, key: str) -> tuple[str, str, str]:
    found = results.fidelity.get(key)
    if found is None:
        return (ABSENT,) * 3
    decibel = "equal" if found.sqnr_db is None else f"{found.sqnr_db:.1f}"
    return f"{100 * found.agreement:.2f}", f"{found.kl:.2e}", decibel


def conditions(results: Results) -> str:
    """Under what conditions accuracy and latency were taken, in one line."""
    parts = []
    if results.accuracy:
        images = sorted({accuracy.images for accuracy in results.accuracy.values()})
        parts.append(f"accuracy on {' / '.join(f'{count:,}' for count in images)} images")
    if not results.labelled and results.fidelity:
        compared = next(iter(results.fidelity.values()))
        parts.append(f"outputs against the float file's on {compared.images:,} images without labels")
    if results.latency:
        latency = next(iter(results.latency.values()))
        threads = "1 thread" if latency.threads == 1 else f"{latency.threads} threads"
        parts.append(
            f"latency: batch {latency.batch}, {threads}, median of {latency.runs} interleaved rounds"
        )
    if results.hardware is not None:
        parts.append(results.hardware.cpu)
    return "; ".join(parts)


CANDIDATE_COLUMNS = ("method", "output error", "top-1 %", "logit error")


def candidate_cells(candidate: Candidate) -> tuple[str, ...]:
    """As `CANDIDATE_COLUMNS`."""
    return (
        candidate.method,
        f"{candidate.output_error:.2e}",
        ABSENT if candidate.top1 is None else f"{candidate.top1:.2f}",
        ABSENT if candidate.logit_error is None else f"{candidate.logit_error:.2e}",
    )


def calibration_lines(candidates: Sequence[Candidate]) -> list[str]:
    """The tournament of calibration methods."""
    return [
        f"calibration: methods as files on {candidates[0].images:,} images that they have not seen",
        *lined(
            [CANDIDATE_COLUMNS, *map(candidate_cells, candidates)],
            [False, *(candidate.chosen for candidate in candidates)],
            "chosen",
        ),
    ]


TRIED_COLUMNS = ("algorithm", "top-1 %", "same top-1 %", "SQNR dB", "seconds", "")


def tried_cells(tried: Tried) -> tuple[str, ...]:
    """As `TRIED_COLUMNS`."""
    return (
        tried.name,
        ABSENT if tried.top1 is None else f"{tried.top1:.2f}",
        ABSENT if tried.agreement is None else f"{100 * tried.agreement:.2f}",
        ABSENT if tried.sqnr_db is None else f"{tried.sqnr_db:.1f}",
        ABSENT if tried.seconds is None else f"{tried.seconds:.1f}",
        tried.why,
    )


def algorithm_lines(algorithms: Sequence[Tried]) -> list[str]:
    """The competition of algorithms."""
    return [
        f"algorithms: each with those kept before it, as files on {algorithms[0].images:,} images that they have "
        "not seen",
        *lined(
            [TRIED_COLUMNS, *map(tried_cells, algorithms)], [False, *(one.kept for one in algorithms)], "kept"
        ),
    ]


def lined(rows: Sequence[tuple[str, ...]], marked: Sequence[bool], mark: str) -> list[str]:
    """Rows of cells as lines of one width."""
    lines = zip(drawn(rows), marked, strict=True)
    return [f"  {line}" + (f"  <- {mark}" if chosen else "") for line, chosen in lines]
