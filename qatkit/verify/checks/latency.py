"""Measures how fast the file runs compared with the float file, round by round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from qatkit.records.fixes import Fix, either
from qatkit.records.results import Results
from qatkit.verify.checks.base import Check, Shortfall, Speeds, Subject
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.errors import counted
from qatkit_verify.records import Latency

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig

_FAST = (
    "avx512_vnni",
    "avx_vnni",
    "amx_int8",
    "asimddp",
    "i8mm",
)  # instruction sets for fast products of bytes


class LatencyCheck(Check):
    """Milliseconds per run of each file; `verify.min_speedup` bounds the speed of the int8 file relative to float."""

    name = "latency"

    def measure(self, subject: Subject, results: Results) -> Results:
        from qatkit_verify.latency import latency

        wanted = subject.settings
        given = subject.timed(wanted.latency_batch)
        each = given if isinstance(given, Mapping) else given[1:]
        found = latency(subject.files, each, batch=wanted.latency_batch, threads=wanted.threads,
                        runs=wanted.latency_runs, options=subject.options)  # fmt: skip
        return replace(results, latency=found)

    def estimate(self, settings: VerifyConfig, speeds: Speeds) -> float:
        from qatkit_verify.latency import WARM_MS, WARMUP

        runs = [settings.latency_batch * speeds.of(name) for name in speeds.files]
        return (WARMUP + settings.latency_runs) * sum(each + max(each, WARM_MS / 1000) for each in runs)

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        if bounds.min_speedup is None:
            return []
        int8 = results.latency.get("int8")
        if int8 is None:
            return [Shortfall(f"verify.min_speedup={bounds.min_speedup}: latency was not measured")]
        if int8.ratio >= bounds.min_speedup:
            return []
        threads = counted(int8.threads, "thread")
        line = (
            f"verify.min_speedup={bounds.min_speedup}: {results.label} runs {int8.ratio:.2f} times as fast as float"
            f" ({', '.join(filter(None, [f'{int8.median_ms:.2f} ms', threads, int8.noise]))})"
        )
        return [Shortfall(line, _fixes(bounds.min_speedup, int8, results))]

    def lines(self, results: Results) -> list[str]:
        """Reports a file that is slower than float, with a fix, if there is no bound on the speed."""
        int8, asked = results.latency.get("int8"), RequestedSettings(results)
        if int8 is None or int8.ratio >= 1 or asked.get("verify.min_speedup") is not None:
            return []
        if without := asked.without_kernels:
            told = f"runs in float here, at {int8.ratio:.2f} of float's speed: no kernel computes {without}"
            return [f"{results.label} {told}"]
        of_float = ", ".join(filter(None, [f"{int8.ratio:.2f} of its speed", int8.noise]))
        slower = f"{results.label} is slower than float here ({of_float})"
        if results.config and (reason := _why_float(asked)):
            return [f"{slower}: {reason}"]
        if _for_another(results):
            return [f"{slower}; the file is for another runtime: measure it there"]
        fix = either([*_placement(asked, results), *_speed_ways(asked, results)] if results.config else ())
        return [slower + (f"; to fix it: {fix}" if fix else "")]


def _fixes(bound: float, int8: Latency, results: Results) -> list[Fix]:
    asked = RequestedSettings(results)
    if not results.config:
        return []
    if reason := _why_float(asked):
        return [Fix(("verify.min_speedup=null",), reason)]
    ways = []
    if int8.ratio_p90 >= bound:
        longer = "the bound is within p10-p90 of the rounds: measure longer"
        ways.append(Fix((f"verify.latency_runs={4 * int8.runs}",), longer))
    if _for_another(results):
        ways.append(Fix(("verify.min_speedup=null",), "this file is for another runtime: measure it there"))
    ways += _speed_ways(asked, results)
    reached = math.floor(100 * int8.ratio) / 100
    met = Fix((f"verify.min_speedup={reached}",), "the speed-up of this file on this machine")
    return [*_placement(asked, results), *(ways or [met])]


def _for_another(results: Results) -> bool:
    return results.audit is not None and not results.audit.for_onnxruntime


def _speed_ways(asked: RequestedSettings, results: Results) -> list[Fix]:
    """Returns the settings and changes, except placement=measured, that may make the file faster."""
    ways, ours = [], not _for_another(results)
    if ours and "session.qdqisint8allowed" in results.session_options and _is_x86(results):
        ways.append(Fix(("backend=fbgemm",), "signed activations are slow on x86; for ARM, measure there"))
    elif ours and results.audit is not None and results.audit.problems and not asked.mode:
        ways.append(Fix(note="faster operators in place of those that the audit reports in float"))
    if asked.left_float():
        ways.append(asked.without_float())
    faster = {"float16": "static", "weight_only": "static", "dynamic": "static"}.get(asked.mode or "")
    if faster:
        ways.append(Fix((f"{asked.mode_key}={faster}",)))
    if results.hardware is not None and not set(_FAST) & set(results.hardware.isa):
        ways.append(Fix(note="a CPU with VNNI (this one has no instructions for 8-bit products)"))
    return ways


def _why_float(asked: RequestedSettings) -> str:
    """Returns why the settings make the file compute in float; "" if they do not."""
    if without := asked.without_kernels:
        return f"no kernel computes {without}: such a file runs in float"
    return (
        "few-bit weights make a file smaller, not faster: it still multiplies floats"
        if asked.weights_alone
        else ""
    )


def _placement(asked: RequestedSettings, results: Results) -> list[Fix]:
    """Returns the advice to set placement=measured, or an empty list.

    It applies to files for ONNX Runtime's int8 kernels that are made from a module, with placement=fixed and
    without backend.every_operator.
    """
    elsewhere = results.audit is not None and not results.audit.for_onnxruntime
    elsewhere = elsewhere or asked.simulated
    fixed = asked.has_module and asked.get("placement") == "fixed" and not asked.get("backend.every_operator")
    measured = Fix(("placement=measured",), "operators that are slower in int8 here stay float")
    return [measured] if fixed and not elsewhere else []


def _is_x86(results: Results) -> bool:
    return results.hardware is None or "x86" in results.hardware.system or "AMD64" in results.hardware.system
