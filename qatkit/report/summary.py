"""The words and figures of a report, formatted once for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from qatkit.verify.results import Audit, Candidate, Comparison, Divergence, Parity, Results

COLUMNS = ("", "top-1 %", "top-5 %", "latency ms [p10-p90]", "speed-up", "size MB", "size ratio")
_ABSENT = "-"


def table_cells(results: Results) -> list[tuple[str, ...]]:
    """One tuple of cells a row, as `COLUMNS`; a figure that was not measured is "-"."""
    return [(label, *_cells(results, key)) for key, label in results.rows]


def _cells(results: Results, key: str) -> tuple[str, ...]:
    accuracy, latency, size = results.accuracy.get(key), results.latency.get(key), results.sizes.get(key)
    reference = results.sizes.get("float")
    return (
        f"{accuracy.top1:.2f}" if accuracy else _ABSENT,
        f"{accuracy.top5:.2f}" if accuracy and accuracy.top5 is not None else _ABSENT,
        f"{latency.median_ms:.2f} [{latency.p10_ms:.2f}-{latency.p90_ms:.2f}]" if latency else _ABSENT,
        f"{latency.ratio:.2f}x" if latency else _ABSENT,
        f"{size / 1e6:.2f}" if size is not None else _ABSENT,
        f"{size / reference:.3f}" if size is not None and reference else _ABSENT,
    )


def conditions(results: Results) -> str:
    """Under what conditions accuracy and latency were taken, in one line."""
    parts = []
    if results.accuracy:
        images = sorted({accuracy.images for accuracy in results.accuracy.values()})
        parts.append(f"accuracy on {' / '.join(f'{count:,}' for count in images)} images")
    if results.latency:
        latency = next(iter(results.latency.values()))
        threads = "1 thread" if latency.threads == 1 else f"{latency.threads} threads"
        parts.append(
            f"latency: batch {latency.batch}, {threads}, median of {latency.runs} interleaved rounds"
        )
    if results.hardware is not None:
        parts.append(results.hardware.cpu)
    return "; ".join(parts)


def parity_lines(parity: Parity) -> list[str]:
    """The comparisons with the reference, and what a step is."""
    width = max(len(label) for label, _ in parity.compared) + 1
    return [
        f"parity on {parity.images:,} images against {parity.reference}"
        f" (step {parity.step:.4g}: {parity.step_source})",
        *(f"  {label + ':':<{width}} {comparison_text(item)}" for label, item in parity.compared),
    ]


def comparison_text(comparison: Comparison) -> str:
    """One comparison in words."""
    return (
        f"top-1 agreement {100 * comparison.agreement:.2f} %, difference max {comparison.max_abs:.3g}"
        f" ({comparison.max_steps:.2f} steps),"
        f" mean {comparison.mean_abs:.3g} ({comparison.mean_steps:.3f} steps)"
    )


CANDIDATE_COLUMNS = ("method", "output error", "top-1 %", "logit error")


def candidate_cells(candidate: Candidate) -> tuple[str, ...]:
    """As `CANDIDATE_COLUMNS`."""
    return (
        candidate.method,
        f"{candidate.output_error:.2e}",
        _ABSENT if candidate.top1 is None else f"{candidate.top1:.2f}",
        _ABSENT if candidate.logit_error is None else f"{candidate.logit_error:.2e}",
    )


def calibration_lines(candidates: Sequence[Candidate]) -> list[str]:
    """The tournament of calibration methods."""
    rows = [CANDIDATE_COLUMNS, *map(candidate_cells, candidates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    chosen = [False, *(candidate.chosen for candidate in candidates)]
    return [
        f"calibration: methods as files on {candidates[0].images:,} images that they have not seen",
        *(
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            + ("  <- chosen" if mark else "")
            for row, mark in zip(rows, chosen, strict=True)
        ),
    ]  # fmt: skip


def divergence_line(divergence: Divergence) -> str:
    """Where the file first leaves the converted module, tensor by tensor."""
    count, tolerance = len(divergence.tensors), divergence.tolerance
    if divergence.first is None:
        return f"tensor by tensor: all {count} quantized tensors within {tolerance} step(s)"
    first = divergence.first
    return (
        f"tensor by tensor: first beyond {tolerance} step(s) is '{first.name}':"
        f" {100 * first.mismatching:.3g} % of {first.elements:,} elements differ,"
        f" by up to {first.max_steps} steps"
    )


def audit_line(audit: Audit) -> str:
    """The audit in one line."""
    matrix = audit.matrix_nodes
    int8 = sum(node.precision == "int8" for node in matrix)
    share = f"({100 * audit.int8_share:.1f} % of multiply-accumulates)"
    if not audit.for_onnxruntime:
        return f"audit: {int8} of {len(matrix)} Conv/Gemm/MatMul ask another runtime for int8 {share}"
    weights = [item for item in audit.runtime_dequantize if item.kind == "weight"]
    megabytes = sum(item.bytes for item in weights) / 1e6
    at_run_time = f"{len(weights)} weights ({megabytes:.1f} MB)" if weights else "no weight"
    return (
        f"audit: {int8} of {len(matrix)} Conv/Gemm/MatMul run int8 {share};"
        f" {audit.quantize} QuantizeLinear, {audit.dequantize} DequantizeLinear,"
        f" {audit.transposes} Transpose left;"
        f" {at_run_time} dequantized at run time"
    )
