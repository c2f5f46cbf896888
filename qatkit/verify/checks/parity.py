"""Checks whether the file computes what was trained, and if not, where it starts to differ."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from qatkit.records.fixes import Fix
from qatkit.records.results import Divergence, Parity, Results
from qatkit.verify.checks.base import Check, Shortfall, Speeds, Subject
from qatkit.verify.checks.exact import exact, is_rounded
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.classification import NAMES
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.records import Comparison, TaskNames

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig

_RARELY = 0.05
_RESOLVED = 10  # expected number of differing images at the bound: enough to tell a lower agreement from it


class ParityCheck(Check):
    """Agreement of the outputs; below its bound `verify.min_agreement` also the first tensor that differs.

    If the first images fall short of the bound by no more than chance would explain, more images decide.
    """

    name = "parity"

    def measure(self, subject: Subject, results: Results) -> Results:
        with exact(subject, results) as at_level_0:
            return self._measure(at_level_0, results)

    def estimate(self, settings: VerifyConfig, speeds: Speeds) -> float:
        reference = "converted" if "simulated" in speeds.predictors else "float"
        return min(speeds.tests, settings.parity_images) * speeds.each(reference, "unoptimized", "int8")

    def _measure(self, subject: Subject, results: Results) -> Results:
        wanted = subject.settings
        found = _measured(subject, wanted.parity_images)
        if wanted.min_agreement is not None and in_doubt(found, wanted.min_agreement):
            first, found = found, _measured(subject, round(_RESOLVED / (1 - wanted.min_agreement)))
            if found.images > first.images:
                note = (
                    f"parity: the decision differs for {_otherwise(first)} of the first {first.images:,}"
                    f" {results.task.samples}, too few to judge verify.min_agreement={wanted.min_agreement};"
                    f" measured on {found.images:,}"
                )
                results = replace(results, notes=(*results.notes, note))
        results = replace(results, parity=found)
        if wanted.min_agreement is None or found.held >= wanted.min_agreement:
            return results
        try:
            return replace(results, divergence=_divergence(subject, found, wanted.min_agreement))
        except Exception as error:  # any error: the figures are worth more than knowing their cause
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            note = f"tensor by tensor: not compared ({kind}{' '.join(str(error).split())[:200]})"
            return replace(results, notes=(*results.notes, note))

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        if bounds.min_agreement is None:
            return []
        if results.parity is None:
            return [Shortfall(f"verify.min_agreement={bounds.min_agreement}: parity was not measured")]
        if results.parity.held >= bounds.min_agreement:
            return []
        line = (
            f"verify.min_agreement={bounds.min_agreement}: ONNX Runtime agrees with {results.parity.reference} on"
            f" {100 * results.parity.held:.2f} % of {results.parity.images} {results.task.samples}"
            f"{but_for_ties(results.parity)}"
        )
        found = results.divergence
        if found is not None and found.begins is not None:
            line += f"; rounding differences accumulate from '{found.begins.name}' on"
        elif found is not None and found.first is not None:
            line += f"; the first tensor that differs is '{found.first.name}'"
        return [Shortfall(line, _fixes(results.parity, results.divergence, RequestedSettings(results)))]

    def lines(self, results: Results) -> list[str]:
        lines = [] if results.parity is None else parity_lines(results.parity, results.task)
        if lines and is_rounded(results):
            lines[0] += ", at accuracy level 0"
        return lines if results.divergence is None else [*lines, divergence_line(results.divergence)]


def _measured(subject: Subject, count: int) -> Parity:
    """Returns the parity on the first `count` images, or on all if there are fewer."""
    from qatkit.verify.parity import file_parity, parity

    file, images = subject.files["int8"], subject.first_images(count)
    options, threads = subject.options, subject.settings.threads
    if subject.reference is not None:
        return parity(subject.reference, file, images, options=options, threads=threads, task=subject.task)
    return file_parity(
        subject.files["float"], file, images, options=options, threads=threads, task=subject.task
    )


def in_doubt(found: Parity, least: float) -> bool:
    """Returns whether chance may explain that a file falls short of the share `least`.

    Assume a file that agrees on exactly the share `least` of all possible images. Chance may explain the
    shortfall if that file would differ on at least as many of the measured images with a probability
    above 5 %.
    """
    import numpy as np

    differing, rate = _otherwise(found), 1 - least
    if found.held >= least or rate == 0:
        return False
    # Logarithms of the binomial distribution: each probability from the one before.
    before = np.arange(differing - 1)
    ratios = np.log((found.images - before) / (before + 1)) + math.log(rate / least)
    logarithms = found.images * math.log(least) + np.concatenate([[0.0], np.cumsum(ratios)])
    fewer = float(np.exp(logarithms[:differing]).sum())
    return 1 - fewer > _RARELY


def _otherwise(found: Parity) -> int:
    """Returns the number of images with another decision; ties do not count."""
    return round((1 - found.held) * found.images)


def _divergence(subject: Subject, parity: Parity, least: float) -> Divergence:
    """Finds the first differing tensor on images with different decisions.

    It compares the file with the module if they disagree even without optimizations, else the file with and
    without optimizations.
    """
    from qatkit.verify.divergence import closest, disagreeing, first_divergence, optimizer_divergence
    from qatkit.verify.parity import between_ends, file_predictors, whole_pixels
    from qatkit_verify.session import integer_io, open_session

    file, threads, options = subject.files["int8"], subject.settings.threads, subject.options
    plain, fast = file_predictors(file, threads, options, subject.task)
    batches = subject.first_images(parity.images)
    written = parity.unoptimized
    if subject.reference is None or written is None or written.held >= least:
        images = disagreeing(plain, [fast], batches, file, subject.task)
        return closest(optimizer_divergence(file, images, options=options, threads=threads))
    module = between_ends(subject.reference, file, threads, options)
    images = disagreeing(lambda x: subject.task.joined(module(x)), [plain], batches, file, subject.task)
    ends = integer_io(open_session(file, threads=threads, optimize=False, options=options))
    recorded = subject.reference.integers(whole_pixels(images, ends), file)
    output = (module(images)[0], parity.step)
    found = first_divergence(file, images, recorded, output=output, options=options, threads=threads)
    return closest(found)


def but_for_ties(found: Parity | Comparison) -> str:
    """Returns a remark that the share compared with a bound leaves out ties; "" if there are none."""
    return (
        "" if found.held == found.agreement else f" except for ties ({100 * found.agreement:.2f} % with them)"
    )


def agreement(comparison: Comparison) -> str:
    """Returns the agreement in percent on all images, and without ties if there are any."""
    share = f"{100 * comparison.agreement:.2f} %"
    return f"{share} ({100 * comparison.held:.2f} % except for ties)" if comparison.ties else share


def parity_lines(parity: Parity, task: TaskNames = NAMES) -> list[str]:
    """Returns lines with the comparisons with the reference, and with the size of a step."""
    width = max(len(label) for label, _ in parity.compared) + 1
    return [
        f"parity on {parity.images:,} {task.samples} against {parity.reference}"
        f" (step {parity.step:.4g}: {parity.step_source})",
        *(f"  {label + ':':<{width}} {_text(item, task)}" for label, item in parity.compared),
    ]


def _text(comparison: Comparison, task: TaskNames) -> str:
    return (
        f"same {task.alike} {agreement(comparison)}, difference max {comparison.max_abs:.3g}"
        f" ({comparison.max_steps:.2f} steps),"
        f" mean {comparison.mean_abs:.3g} ({comparison.mean_steps:.3f} steps)"
    )


def divergence_line(divergence: Divergence) -> str:
    """Describes where the file first differs from the converted module, or from itself unoptimized."""
    count, tolerance = len(divergence.tensors), divergence.tolerance
    against = "" if divergence.reference == "the converted module" else f", against {divergence.reference}"
    steps = counted(tolerance, "step")
    if divergence.first is None:
        agree = f"all {count} compared tensors agree" if count != 1 else "the compared tensor agrees"
        return f"tensor by tensor: {agree} within {steps}{against}"
    first = divergence.first
    where = f" of operator '{divergence.operator}'" if divergence.operator else ""
    return (
        f"tensor by tensor: the first that differs by more than {steps} is '{first.name}'{where}:"
        f" {100 * first.mismatching:.3g} % of {first.elements:,} elements, by up to"
        f" {first.max_steps} steps{against}"
    )


def _fixes(parity: Parity, divergence: Divergence | None, asked: RequestedSettings) -> list[Fix]:
    met = f"verify.min_agreement={math.floor(10_000 * parity.held) / 10_000}"
    if asked.mode is not None:
        return asked.other_modes()
    if divergence is None or not asked.has_module:
        return []
    if divergence.begins is not None:
        return [Fix((met,), "rounding differences of single values accumulate; no operator is at fault")]
    if divergence.first is not None:
        return asked.override(divergence.operator)
    return [Fix((met,), "every tensor agrees; only the order of float sums differs")]
