"""Checks, operator by operator, whether the int8 operators of the file run in int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qatkit.quant.spec import NARROW_BIAS, SIXTEEN_BITS
from qatkit.records.fixes import Fix
from qatkit.records.results import Audit, Results
from qatkit.verify.checks.base import Check, Shortfall, Subject, capped
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.errors import counted

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig


class AuditCheck(Check):
    """An audit of the graph that ONNX Runtime really runs; `verify.audit` requires that it finds no problem."""

    name = "audit"
    early = True

    def measure(self, subject: Subject, results: Results) -> Results:
        from qatkit.verify.audit import audit

        found = audit(subject.files["int8"], options=subject.options, threads=subject.settings.threads,
                      allow_float=subject.allow_float, input_shape=subject.file_shape or _given(subject),
                      other_runtime=subject.other_runtime)  # fmt: skip
        return replace(results, audit=found)

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        if not bounds.audit or RequestedSettings(results).simulated:
            return []
        if results.audit is None:
            return [Shortfall("verify.audit=true: the file was not audited")]
        if results.audit.ok:
            return []
        first, count = results.audit.problems[0], len(results.audit.problems)
        more = f" (and {count - 1} more)" if count > 1 else ""
        return [
            Shortfall(f"verify.audit=true: {first}{more}", _fixes(results.audit, RequestedSettings(results)))
        ]

    def lines(self, results: Results) -> list[str]:
        if results.audit is None:
            return []
        if RequestedSettings(results).simulated:
            count = len(results.audit.matrix_nodes)
            return [f"audit: {count} Conv/Gemm/MatMul compute in float: the number formats are simulated"]
        if without := RequestedSettings(results).without_kernels:
            rest = "; the report lists what runs in float" if results.output_dir else ""
            return [f"{audit_line(results.audit)}; no kernel computes {without}{rest}"]
        line = audit_line(results.audit, weights_alone=RequestedSettings(results).weights_alone)
        problems = results.audit.problems
        if not results.output_dir:  # a first export has no report.json that lists the rest
            return [line, *(f"  problem: {problem}" for problem in problems)]
        return [line, *capped("problem: ", problems)]


def audit_line(audit: Audit, *, weights_alone: bool = False) -> str:
    """Returns the audit in one line; `weights_alone` means that only weights were to be quantized."""
    matrix = audit.matrix_nodes
    int8 = sum(node.precision == "int8" for node in matrix)
    share = f"({100 * audit.int8_share:.1f} % of multiply-accumulates)"
    if not audit.for_onnxruntime:
        return f"audit: {int8} of {len(matrix)} Conv/Gemm/MatMul request int8 from another runtime {share}"
    weights = [item for item in audit.runtime_dequantize if item.kind == "weight"]
    megabytes = sum(item.bytes for item in weights) / 1e6
    alone = sum(node.precision == "weight-only" for node in matrix)
    if not int8 and (alone or weights_alone):
        bits = "" if audit.packed_bits is None else f" ({audit.packed_bits:.2f} bits per weight, with scales)"
        rest = ", the others in float" if alone < len(matrix) else ""
        return f"audit: {alone} of {len(matrix)} Conv/Gemm/MatMul multiply by packed weights{bits}{rest}"
    wide, narrow = (sum(node.reason == why for node in matrix) for why in (SIXTEEN_BITS, NARROW_BIAS))
    floats = {"16-bit inputs or outputs": wide, "a bias of fewer than 32 bits": narrow}
    told = "".join(f", {n} in float because of {what}" for what, n in floats.items() if n)
    at_run_time = f"{counted(len(weights), 'weight')} ({megabytes:.1f} MB)" if weights else "no weight"
    return (
        f"audit: {int8} of {len(matrix)} Conv/Gemm/MatMul run in int8 {share}"
        f"{told};"
        f" {audit.quantize} QuantizeLinear, {audit.dequantize} DequantizeLinear,"
        f" {audit.transposes} Transpose left;"
        f" {at_run_time} dequantized at run time"
    )


def _fixes(audit: Audit, asked: RequestedSettings) -> list[Fix]:
    """Returns the proposed fix: an override that keeps the first problematic operator in float.

    The list is empty if no operator is problematic or no override can name it. For a file without a module, no
    override applies, and the fix is verify.audit=false.
    """
    if asked.mode is not None:
        still = "in this mode no override applies; the report still lists what runs in float"
        return [Fix(("verify.audit=false",), still)]
    node = next((node for node in audit.nodes if node.problem), None)
    if node is None or not asked.has_module:
        return []
    return asked.override(node.source, f"keeps it in float: {node.reason}")


def _given(subject: Subject) -> Sequence[int] | Mapping[str, Any] | None:
    """Returns an input for a file with dynamic axes other than the batch; None if the file fixes them all."""
    import onnx_ir as ir

    inputs = ir.load(str(subject.files["int8"])).graph.inputs
    shapes = [list(one.shape or ()) for one in inputs]
    others = [size for shape in shapes for size in (shape[1:] if len(shape) > 1 else shape)]
    left_open = any(not isinstance(size, int) for size in others)
    return subject.timed(subject.settings.latency_batch) if left_open else None
