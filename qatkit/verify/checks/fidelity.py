"""Measures how close the file's outputs are to the float file's; replaces accuracy if there are no labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from qatkit.quant.spec import RECURRENT_WEIGHTS
from qatkit.records.fixes import Fix
from qatkit.records.results import FREE, Fidelity, Results
from qatkit.verify.checks.base import Check, Shortfall, Speeds, Subject
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.records import TaskNames

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig


_DRIFTS = 3.0  # dB by which drift lowers SQNR; above it, errors of the states are more than half of the error


class FidelityCheck(Check):
    """Agreement of the decisions, divergence and SQNR against float.

    Without labels, all test images are used, the simulation is measured too, and the bounds are
    `verify.min_float_agreement`, `verify.max_float_kl` and `verify.min_float_sqnr`. With labels, the bound is
    on accuracy, and these figures come from the first `verify.parity_images` images. If states are fed back,
    the bounds on agreement and SQNR apply to the figures of `DriftCheck`.
    """

    name = "fidelity"

    def measure(self, subject: Subject, results: Results) -> Results:
        from qatkit.verify.accuracy import all_cores, file_predictor, in_parts
        from qatkit.verify.fidelity import fidelity, unlabelled
        from qatkit_verify.session import open_session

        wanted = subject.settings
        sessions = {
            name: open_session(path, threads=all_cores(), options=subject.options)
            for name, path in subject.files.items()
        }
        runs = {name: in_parts(file_predictor(s, subject.task)) for name, s in sessions.items()}
        exact = runs.pop("float")
        if subject.labelled:
            batches = unlabelled(subject.first_images(wanted.parity_images))
            return _kept(results, fidelity(exact, runs, batches, task=subject.task))
        runs |= {name: in_parts(predict) for name, predict in subject.predictors.items()}
        found = fidelity(exact, runs, subject.batches(), subject.progress, task=subject.task)
        return _kept(results, found)

    def estimate(self, settings: VerifyConfig, speeds: Speeds) -> float:
        if speeds.labelled:
            return min(speeds.tests, settings.parity_images) * speeds.each(*speeds.files)
        return speeds.images * speeds.each(*speeds.files, *speeds.predictors)

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        if results.labelled:
            return []
        from qatkit.config.schema import UNLABELLED_BOUNDS

        asked = {key: getattr(bounds, key) for key in UNLABELLED_BOUNDS}
        set_ones = {key: bound for key, bound in asked.items() if bound is not None}
        found = results.fidelity.get("int8")
        if found is None:
            return [
                Shortfall(f"verify.{key}={bound}: agreement with float was not measured")
                for key, bound in set_ones.items()
            ]
        told = _broken(set_ones, found, results)
        fixes = _without_drift(results) or RequestedSettings(results).closer()
        return [Shortfall(f"verify.{key}={set_ones[key]}: {text}", fixes) for key, text in told.items()]

    def lines(self, results: Results) -> list[str]:
        found = results.fidelity.get("int8")
        if found is None:
            return []
        where = f"{found.images:,} {results.task.samples}"
        line = f"against the float file on {where}: {fidelity_text(found, results.task)}"
        return [line if results.labelled else f"accuracy is unknown without labels; {line}"]


def _kept(results: Results, found: Mapping[str, Fidelity]) -> Results:
    """Returns the results with these figures, and with a note if a figure is not meaningful."""
    near = found.get("int8")
    if near is None or not near.doubt:
        return replace(results, fidelity=found)
    note = (
        f"same {results.task.decision}: it says nothing about these {near.images:,} {results.task.samples}, since"
        f" {near.doubt}"
    )
    return replace(results, fidelity=found, notes=(*results.notes, note))


def _broken(bounds: dict[str, float], found: Fidelity, results: Results) -> dict[str, str]:
    """Returns, as text, the measured values that miss their bounds, by the key of the bound."""
    told, label, task = {}, results.label, results.task
    free = results.fidelity.get(FREE)
    decided, over = (found, task.samples) if free is None else (free, "steps, each file with its own states")
    if decided.agreement < bounds.get("min_float_agreement", 0.0):
        share = f"same {task.decision} {100 * decided.agreement:.2f} % on {decided.images} {over}"
        told["min_float_agreement"] = f"{share}, {label} against the float file"
    if found.kl is not None and found.kl > bounds.get("max_float_kl", math.inf):
        told["max_float_kl"] = f"KL of {label} against the float file is {found.kl:.3g} nats"
    if decided.sqnr_db is not None and decided.sqnr_db < bounds.get("min_float_sqnr", -math.inf):
        free_run = "" if free is None else f" on {free.images} {over}"
        told["min_float_sqnr"] = (
            f"SQNR of {label} against the float file's {task.outputs} is {decided.sqnr_db:.1f} dB{free_run}"
        )
    return told


def _without_drift(results: Results) -> list[Fix]:
    """Returns an override that keeps recurrent weights float if states cause most of the error, else []."""
    near, free = results.fidelity.get("int8"), results.fidelity.get(FREE)
    recurrent = [site for site, reason in results.skipped if reason == RECURRENT_WEIGHTS]
    if near is None or free is None or not recurrent or free.sqnr_db is None:
        return []
    with_floats = math.inf if near.sqnr_db is None else near.sqnr_db
    overrides = ",".join(f"{site}:{{float:true}}" for site in recurrent)
    if with_floats - free.sqnr_db < _DRIFTS or not RequestedSettings(results).has_module:
        return []
    drift = (
        f"their rounded weights make the states drift: SQNR {with_floats:.1f} dB with the float file's states,"
        f" {free.sqnr_db:.1f} dB with its own"
    )
    return [Fix((f"+backend.overrides={{{overrides}}}",), drift)]


def fidelity_text(found: Fidelity, task: TaskNames) -> str:
    """Returns the figures as text, with the divergence if there is one."""
    decibel = "equal" if found.sqnr_db is None else f"SQNR {found.sqnr_db:.1f} dB"
    divergence = "" if found.kl is None else f"KL {found.kl:.2e}, "
    remark = f" ({found.remark})" if found.remark else ""
    share = f"same {task.decision} {100 * found.agreement:.2f} %{remark}"
    return f"{share}, {divergence}{task.outputs} {decibel}"
