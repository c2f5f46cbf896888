"""Checks whether the error of a model with states accumulates when both files run on their own states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qatkit.records.results import FREE, Results
from qatkit.verify.checks.base import Check, Subject
from qatkit_verify.errors import counted
from qatkit_verify.records import TaskNames
from qatkit_verify.table import drawn

NAME = "drift"


class DriftCheck(Check):
    """Agreement and SQNR of free runs over growing numbers of steps; skipped for a model without states.

    Without labels, `FidelityCheck` compares them with `verify.min_float_agreement` and
    `verify.min_float_sqnr`.
    """

    name = NAME

    def measure(self, subject: Subject, results: Results) -> Results:
        if subject.sequences is None:
            return results
        from qatkit.verify.drift import drift_of_files

        found = drift_of_files(
            [subject.files[name] for name in ("float", "int8")],
            subject.states,
            subject.sequences(),
            subject.task,
            threads=subject.settings.threads,
            options=subject.options,
            progress=subject.progress,
        )
        results = results.with_measured(NAME, {"states": dict(subject.states), **found.as_dict()})
        if subject.labelled:
            return results
        return replace(results, fidelity={**results.fidelity, FREE: found.near})

    def lines(self, results: Results) -> list[str]:
        found = results.measured.get(NAME)
        if found is None:
            return []
        rows = [columns(found, results.task), *cells(found)]
        return [f"{heading(found, results.label)}:", *(f"  {line}" for line in drawn(rows, figures=True))]


def heading(found: Mapping[str, Any], label: str) -> str:
    """Returns a description of what was compared."""
    count, steps = found["sequences"], found["horizons"][-1]["counted"]
    return (
        f"drift: float and {label} each with their own states, {counted(steps, 'step')} of"
        f" {counted(count, 'sequence')}"
    )


def columns(found: Mapping[str, Any], task: TaskNames) -> tuple[str, ...]:
    """Returns the column headings of the table of horizons."""
    outputs = found["horizons"][-1]["outputs"]
    return ("first steps", task.same, *(f"{one['name']} dB" for one in outputs))


def cells(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns one tuple of cells per horizon, in the order of `columns`."""
    return [
        (f"{one['steps']:,}", f"{100 * one['agreement']:.2f}", *map(_decibel, one["outputs"]))
        for one in found["horizons"]
    ]


def _decibel(output: Mapping[str, Any]) -> str:
    return "equal" if output["sqnr_db"] is None else f"{output['sqnr_db']:.1f}"
