"""Measures the file in runtimes other than ONNX Runtime: latency, accuracy and agreement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qatkit.records.fixes import Fix
from qatkit.records.results import ALONE, Divergence, InRuntime, Results
from qatkit.verify.checks.base import Check, Shortfall, Subject
from qatkit.verify.checks.parity import but_for_ties
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.errors import as_typed
from qatkit_verify.foreign import described
from qatkit_verify.records import Comparison, Latency, Scores, TaskNames
from qatkit_verify.runtimes.base import REFERENCE, Runtime, other_runtimes
from qatkit_verify.table import drawn

if TYPE_CHECKING:
    import onnxruntime as ort

    from qatkit.config.schema import VerifyConfig
    from qatkit.verify.parity import AllOutputs

_ABSENT = "-"


class RuntimesCheck(Check):
    """Latency, accuracy and agreement in each runtime of `verify.runtimes` other than ONNX Runtime.

    At the first export there are no images, and each runtime only has to run the file once.
    """

    name = "runtimes"
    early = True

    def measure(self, subject: Subject, results: Results) -> Results:
        others = other_runtimes(subject.settings.runtimes)
        if not others:
            return results
        whole = next(iter(subject.first_images(1)), None) is not None
        times = _times(subject, others) if whole else {}
        found = {}
        for path, runtime in others.items():
            taken = times.get(path, {})
            one = InRuntime(runtime.versions(), latency={} if isinstance(taken, str) else taken)
            try:
                if isinstance(taken, str):
                    found[runtime.name] = replace(one, failed=taken)
                else:
                    found[runtime.name] = (
                        _compared(subject, runtime, one) if whole else _tried(subject, runtime, one)
                    )
            except Exception as error:  # any exception of a runtime: the rest of the report is worth keeping
                found[runtime.name] = replace(one, failed=described(error))
        return replace(results, runtimes=found)

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        others = sorted(set(bounds.runtimes) - {REFERENCE})
        if others and not results.runtimes:
            verb = "was" if len(others) == 1 else "were"
            return [
                Shortfall(f"verify.runtimes={as_typed(others)}: {' and '.join(others)} {verb} not measured")
            ]
        found = [_shortfall(name, one, bounds, results) for name, one in results.runtimes.items()]
        return [one for one in found if one is not None]

    def lines(self, results: Results) -> list[str]:
        if not any(one.latency or one.failed for one in results.runtimes.values()):
            return []
        table = [columns(results.task), *rows(results)]
        return [
            "runtimes: the same file, timed in one process per runtime",
            *(f"  {row}" for row in drawn(table)),
            *notes(results),
        ]


def columns(task: TaskNames) -> tuple[str, ...]:
    """Returns the column headings of the table."""
    times = ("runtime", "INT8 ms [p10-p90]", "float ms", "speed-up")
    return (*times, task.main.title, f"same {task.alike} as module, %", "as ONNX Runtime, %")


def rows(results: Results) -> list[tuple[str, ...]]:
    """Returns the cells of `columns`, the fastest runtime first and failed ones last."""
    names = [*results.runtime_latency, *(name for name, one in results.runtimes.items() if not one.latency)]
    return [_row(name, results) for name in names]


def _row(name: str, results: Results) -> tuple[str, ...]:
    one = results.runtimes.get(name)
    latency = results.latency if one is None else one.latency
    accuracy = results.accuracy.get("int8") if one is None else one.accuracy
    parity = results.parity
    trained = parity is not None and parity.unoptimized is not None  # otherwise there is no module
    module = (parity.optimized if trained and parity else None) if one is None else one.with_module
    versions = results.versions.get(name, "") if one is None else " ".join(one.versions.values())
    int8, exact = latency.get("int8"), latency.get("float")
    return (
        f"{name} {versions}".rstrip(),
        f"{int8.median_ms:.2f} [{int8.p10_ms:.2f}-{int8.p90_ms:.2f}]" if int8 else _ABSENT,
        f"{exact.median_ms:.2f}" if exact else _ABSENT,
        int8.speed if int8 else _ABSENT,
        f"{accuracy.score:.2f}" if accuracy else _ABSENT,
        _percent(module),
        _percent(None if one is None else one.with_onnxruntime),
    )


def notes(results: Results) -> list[str]:
    """Returns lines on which runtime is the fastest, where one differs from ONNX Runtime, and what was not compared."""
    said = []
    ranking = [(name, found["int8"]) for name, found in results.runtime_latency.items()]
    if len(ranking) > 1:
        (first, best), (second, next_best) = ranking[:2]
        apart = "" if best.p90_ms < next_best.p10_ms else " (their p10-p90 overlap)"
        ratio = next_best.median_ms / best.median_ms
        said.append(f"fastest runtime: {first}, {ratio:.2f} times as fast as {second}{apart}")
    for name, one in results.runtimes.items():
        if one.divergence is not None:
            said.append(f"{name}: {_where(one.divergence)}")
        said += [f"{name}: {one.note}"] if one.note else []
    return said


def _where(divergence: Divergence) -> str:
    """Describes the first tensor that differs, and what that implies, or says that none does."""
    alone = divergence.reference == ALONE
    if divergence.first is None:
        return (
            "each operator by itself agrees with ONNX Runtime within a step, and so does every tensor that was"
            " exposed"
        )
    first, said = divergence.first, "from the same inputs" if alone else "in the whole file"
    why = (
        ""
        if alone
        else "; each operator by itself agrees within a step, so the runtime fuses operators and rounds differently"
    )
    where = f" of operator '{divergence.operator}'" if divergence.operator else ""
    return (
        f"the first tensor that differs from ONNX Runtime's {said} is '{first.name}'{where}:"
        f" {100 * first.mismatching:.3g} % of {first.elements:,} elements, by up to {first.max_steps} steps{why}"
    )


def _times(subject: Subject, others: Mapping[str, Runtime]) -> dict[str, dict[str, Latency] | str]:
    """Returns, by dotted path, the latency of float and INT8, or why the runtime failed."""
    from qatkit_verify.feeds import noise_feeds
    from qatkit_verify.latency import from_times
    from qatkit_verify.runtimes.timing import times_in_turns

    wanted, batch = subject.settings, subject.settings.latency_batch
    given, files = subject.timed(batch), {name: subject.files[name] for name in ("float", "int8")}
    feeds = {name: noise_feeds(_ports(subject, name), given, 0) for name in files}
    found = times_in_turns(others, files, feeds, threads=wanted.threads, runs=wanted.latency_runs)
    return {
        path: times
        if isinstance(times, str)
        else {name: from_times(times["float"], one, batch, wanted.threads) for name, one in times.items()}
        for path, times in found.items()
    }


def _tried(subject: Subject, runtime: Runtime, one: InRuntime) -> InRuntime:
    """Runs the file once on noise, which raises the runtime's errors; returns `one` unchanged."""
    from qatkit_verify.feeds import noise_feeds

    ports = _ports(subject, "int8")
    given = subject.file_shape or subject.timed(subject.settings.latency_batch)
    runtime.open(subject.files["int8"], subject.settings.threads)(noise_feeds(ports, given, 0))
    return one


def _compared(subject: Subject, runtime: Runtime, one: InRuntime) -> InRuntime:
    """Measures accuracy and agreement; below `verify.min_agreement` also the first tensor that differs."""
    from qatkit.verify.accuracy import module_accuracy
    from qatkit.verify.parity import against, between_ends
    from qatkit_verify.session import open_session, outputs_by, run_outputs

    wanted, file = subject.settings, subject.files["int8"]
    ports, execute = _ports(subject, "int8"), runtime.open(file, wanted.threads)
    session = open_session(file, threads=wanted.threads, options=subject.options)

    def outputs(batch: Any) -> Any:
        return outputs_by(execute, ports, batch)

    accuracy: Scores | None = None
    if subject.labelled:
        accuracy = module_accuracy(
            lambda x: subject.task.joined(outputs(x)),
            subject.batches(),
            subject.progress,
            runtime.name,
            task=subject.task,
        )
    references: dict[str, AllOutputs] = {REFERENCE: lambda batch: run_outputs(session, batch)}
    if subject.reference is not None:
        references["module"] = between_ends(subject.reference, file, wanted.threads, subject.options)
    images, near = against(references, outputs, file, subject.first_images(wanted.parity_images),
                           subject.task)  # fmt: skip
    one = replace(one, accuracy=accuracy, images=images, with_onnxruntime=near[REFERENCE],
                  with_module=near.get("module"))  # fmt: skip
    if wanted.min_agreement is None or near[REFERENCE].held >= wanted.min_agreement:
        return one
    try:
        return replace(
            one, divergence=_divergence(subject, runtime, session, lambda x: subject.task.joined(outputs(x)))
        )
    except Exception as error:  # any error: the figures are worth more than knowing their cause
        return replace(one, note=f"tensor by tensor: not compared ({described(error)})")


def _divergence(
    subject: Subject, runtime: Runtime, session: ort.InferenceSession, predict: Any
) -> Divergence:
    """Finds the first differing tensor on images for which the two runtimes decide differently."""
    from qatkit.verify.accuracy import file_predictor
    from qatkit.verify.divergence import disagreeing
    from qatkit.verify.runtime_divergence import runtime_divergence

    wanted, file = subject.settings, subject.files["int8"]
    batches = subject.first_images(wanted.parity_images)
    images = disagreeing(file_predictor(session, subject.task), [predict], batches, file, subject.task)
    return runtime_divergence(runtime, file, images, options=subject.options, threads=wanted.threads)


def _ports(subject: Subject, name: str) -> ort.InferenceSession:
    """Opens an ONNX Runtime session of a file for the names and types of its inputs."""
    from qatkit_verify.session import open_session

    return open_session(subject.files[name], threads=1, optimize=False, options=subject.options)


def _shortfall(name: str, one: InRuntime, bounds: VerifyConfig, results: Results) -> Shortfall | None:
    if one.failed:
        return Shortfall(
            f"verify.runtimes={name}: {name} cannot run the {results.label} file ({one.failed})",
            [_without(name)],
        )
    near, least = one.with_onnxruntime, bounds.min_agreement
    if near is None or least is None or near.held >= least:
        return None
    line = (
        f"verify.min_agreement={least}: {name} agrees with ONNX Runtime on {100 * near.held:.2f} % of"
        f" {one.images} {results.task.samples}{but_for_ties(near)}"
    )
    if one.divergence is not None and one.divergence.first is not None:
        line += f"; the first tensor that differs is '{one.divergence.first.name}'"
    return Shortfall(line, _fixes(name, one.divergence, near, RequestedSettings(results)))


def _fixes(name: str, divergence: Divergence | None, near: Comparison, asked: RequestedSettings) -> list[Fix]:
    """Proposes to leave the runtime out or to keep in float the operator that it computes wrongly.

    If no single operator is wrong, no override helps, and a smaller bound is proposed instead.
    """
    if divergence is not None and divergence.reference == ALONE:
        ways = asked.override(divergence.operator) if asked.has_module else []
    else:
        reached = math.floor(10_000 * near.held) / 10_000
        ways = [Fix((f"verify.min_agreement={reached}",), f"the agreement of {name}")]
    return [*ways, _without(name)]


def _without(name: str) -> Fix:
    return Fix(note=f"verify.runtimes without {name} (the file is then only for the others)")


def _percent(comparison: Comparison | None) -> str:
    return _ABSENT if comparison is None else f"{100 * comparison.agreement:.2f}"
