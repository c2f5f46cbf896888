"""The verification of every run, with or without a module: checks, bounds, report.html, report.json and a table.

Subject ─ each check of `verify.checks` in turn ─> Results ─ bounds ─> shortfalls, each with a suggested fix
"""

from __future__ import annotations

import glob
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import fx, nn

from qatkit import report
from qatkit.algorithms.base import algorithms_of
from qatkit.choose.epochs import curves_of
from qatkit.config.argv import command_with
from qatkit.config.schema import UNLABELLED_BOUNDS, Config, VerifyConfig
from qatkit.config.selectors import shown
from qatkit.data import DataModule
from qatkit.export.converted_reference import ConvertedReference
from qatkit.graph.guarded import guards
from qatkit.graph.learning import oscillating
from qatkit.graph.overrides import MATCHED
from qatkit.graph.precomputed import settled_graph
from qatkit.graph.selectors import names_in_file
from qatkit.importing import ImportedModel
from qatkit.jobs.dynamic_file import with_dynamic
from qatkit.jobs.hand_over import ended, hand_over
from qatkit.jobs.stages import State
from qatkit.records.ladder import read_ladder
from qatkit.records.plan import Planned, with_seconds
from qatkit.records.results import DYNAMIC, Results
from qatkit.records.run_files import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    FLOAT_FILE,
    PAGE_FILE,
    PLACEMENT_FILE,
    REPORT_FILE,
)
from qatkit.records.tried import Ran
from qatkit.report import oscillation_text
from qatkit.report.next_steps import next_steps
from qatkit.run.backend import backend_of
from qatkit.run.folder import Run
from qatkit.run.loop.fit import accelerator
from qatkit.run.pace import Pace
from qatkit.run.plan import stage
from qatkit.run.sound import overrides_of
from qatkit.train.module import NOTHING, RAN, QATModule
from qatkit.verify.accuracy import predictor
from qatkit.verify.checks.base import Check, Speeds, Subject, default_checks, load_checks
from qatkit.verify.checks.exact import LEVEL
from qatkit.verify.checks.saturation import GUARDS
from qatkit.verify.thresholds import shortfalls
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.runtimes.base import other_runtimes
from qatkit_verify.session import fixed_batch, open_session, session_options

SAMPLE_BATCH = 32  # images per batch of a subset of the test images


def planned_verification(
    config: Config, data: DataModule, pace: Pace, files: Sequence[str], predictors: Sequence[str] = ()
) -> list[Planned]:
    """Returns the rows of the plan for the checks and, if requested, for the bundle and its publication.

    Args:
        config: the configuration of the run.
        data: the data of the run.
        pace: the measured speeds.
        files: the names of the files that are measured.
        predictors: the names of other models whose accuracy is measured, such as "simulated".
    """
    wanted, tests, names = config.verify, data.test_count, data.task.names
    images = tests if wanted.images is None else min(tests, wanted.images)
    speeds = Speeds(
        partial(_speed, pace), tuple(files), tuple(predictors), images, tests, labelled=data.labelled
    )
    checks = checks_of(config, labelled=data.labelled)
    told = "accuracy" if data.labelled else "agreement with float"
    about = f"{counted(wanted.latency_runs, 'round')} of latency, {told} on {images:,} {names.samples}"
    about += f", parity on {min(tests, wanted.parity_images):,}"

    def seconds() -> float:
        return sum(check.estimate(wanted, speeds) for check in checks)

    rows = [stage("verify", about, seconds)]
    if config.export.bundle:
        rows.append(
            stage("bundle", "files, golden vectors and programs", "it depends on the size of the files")
        )
    if config.export.publish is not None:
        rows.append(stage("publish", f"to {config.export.publish}", "it depends on the connection"))
    return rows


def _speed(pace: Pace, name: str) -> float:
    """Returns the seconds per sample for a file, for another predictor, or for loading."""
    if name == "load":
        return pace.load
    if name == "control":
        return pace.forward
    return pace.simulated if name == "simulated" else pace.file(name)


def checks_of(config: Config, *, labelled: bool) -> list[Check]:
    """Returns the checks that `config.verify` lists, for images with or without labels.

    Raises:
        ConfigError: a path names no check, the check of a bound is not in the list, a bound does not apply to
            images with labels, or `verify.runtimes` does not suit the backend.
    """
    for key in UNLABELLED_BOUNDS if labelled else ():
        value, default = getattr(config.verify, key), getattr(VerifyConfig(), key)
        if value != default:
            allowed = f"{default} with labels, where verify.max_drop is the bound"
            raise ConfigError(f"verify.{key}", value, allowed)
    _check_runtimes(config)
    checks = load_checks(config.verify.checks)
    names = {check.name for check in checks}
    absent = [check for check in default_checks() if check.name not in names]
    nothing = Results(config.name, "", "", labelled=labelled)
    for missing in shortfalls(absent, config.verify, nothing):
        allowed = f"a list with the check of each bound ({missing.line})"
        raise ConfigError("verify.checks", config.verify.checks, allowed)
    return checks


def _check_runtimes(config: Config) -> None:
    """Rejects runtimes besides ONNX Runtime for a backend whose static files are specific to another runtime."""
    others = other_runtimes(config.verify.runtimes)
    static = (config.mode or config.export.mode) == "static"
    if others and static and backend_of(config).other_runtime:
        allowed = (
            f"[onnxruntime] with backend.target={config.backend.target}, whose files are for another runtime"
        )
        raise ConfigError("verify.runtimes", config.verify.runtimes, allowed)


def conclude(run: Run, subject: Subject, told: Results, files: Sequence[str]) -> int:
    """Checks a finished file, and writes and prints its report.

    Args:
        run: the run, whose folder contains all files except report.html and report.json.
        subject: the files to check.
        told: the results known without measuring: model, skipped sites, calibration, notes, configuration.
        files: the names of files in the folder whose digests are part of the report.

    Returns:
        0, or 1 if a bound is missed.
    """
    checks, wanted = checks_of(run.config, labelled=subject.labelled), run.config.verify
    with run.stage("verify", "verifying the files in ONNX Runtime"):
        subject, notes = with_dynamic(subject, run.config)
        results = _about(subject, replace(told, notes=(*told.notes, *notes)))
        for check in checks:
            start = time.monotonic()
            results = check.measure(subject, results)
            run.seconds[f"verify, {check.name}"] = round(time.monotonic() - start, 2)
            if not isinstance(results, Results):
                allowed = (
                    f"a check whose `measure` returns Results; the check returned {type(results).__name__}"
                )
                raise ConfigError("verify.checks", check.name, allowed)
    files = [*files, *(path.name for name, path in subject.files.items() if name == DYNAMIC)]
    run.keep(files)
    results = replace(results, timings=run.seconds, plan=with_seconds(run.plan, run.seconds))
    results = replace(results, files=report.file_records(run.folder, files))
    found = shortfalls(checks, wanted, results)
    results = replace(results, shortfalls=[one.line for one in found], fixes=[one.fixes for one in found])
    results = replace(results, ladder=read_ladder(run.folder))
    explained = any(one.explained for one in found)
    results = replace(results, climb="" if explained else _climb(run.config, results))
    run.next = next_steps(results)
    results = replace(results, next=run.next)
    report.write_page(run.folder / PAGE_FILE, results, checks)
    report.write_report(run.folder / REPORT_FILE, results)
    report.print_report(results, checks=checks)
    return 1 if results.shortfalls else 0


def _climb(config: Config, results: Results) -> str:
    """Returns the command of a rescue if the file of a run of train.py is too far from float, else "".

    After a rescue, and without a typed command line, the result is "" too.
    """
    far = [line for line in results.shortfalls if line.startswith(("verify.max_drop", "verify.min_float_"))]
    if not far or results.ladder is not None or config.mode is not None:
        return ""
    wanted, target, bounds = ["rescue=ladder"], config.target, config.verify
    if results.labelled and bounds.max_drop is not None and 0 <= bounds.max_drop < target.max_drop:
        wanted.append(f"target.max_drop={bounds.max_drop:g}")
    return command_with(*wanted, without=("export.mode",))


def _about(subject: Subject, told: Results) -> Results:
    """Returns the results with facts about the file and the machine."""
    threads = subject.settings.threads
    session = open_session(subject.files["int8"], threads=threads, optimize=False, options=subject.options)
    return replace(
        told,
        output_dir=str(subject.folder),
        label=subject.label,
        labelled=subject.labelled,
        task=subject.task.names,
        int8_file=subject.files["int8"].name,
        fixed_batch=fixed_batch(session),
        session_options=session_options(subject.options),
        hardware=report.this_hardware(threads),
        versions=report.installed_versions(),
    )


def conclude_module(state: State) -> int:
    """Runs `conclude` for a file made from a module, including the simulation, the converted module and the control."""
    run, data, module, written = state.run, state.data, state.prepared, state.exported
    config = run.config
    stored = [Ran(**one) for one in module.about.get(RAN, ())]
    idle = [(one.name, NOTHING) for one in stored if not one.changed]
    followed = [asdict(one) for one in oscillating(module.graph)]
    jumps = oscillation_text.figures(followed)
    told_jumps = [oscillation_text.line(jumps, module.schedule.oscillation)] if followed else []
    told = Results(
        config.name,
        config.model.name,
        str(run.folder),
        skipped=tuple(module.skipped + written.converted.skipped + module.notes + idle),
        calibration=state.calibrated.candidates,
        algorithms=state.tried,
        ran=() if state.tried else _named(config, module.ran + stored),
        analysis=state.analysis,
        curves=curves_of(run, data),
        precision=state.precision,
        placement=run.placed,
        notes=(*run.notes, *data.notes, *state.calibrated.notes, *written.notes, *told_jumps),
        classes=data.classes,
        measured={"oscillation": jumps} if followed else {},
        preprocessing=data.preprocessing.as_dict() if data.of_pictures else None,
        config=asdict(run.asked or config),
    )
    told = told.with_measured(GUARDS, _guards(config, module))
    if asked := [shown(one) for one in overrides_of(run.asked or config)]:
        matched = [one for one in module.graph.meta.get(MATCHED, ()) if one["selector"] in asked]
        told = told.with_measured("overrides", {"matched": matched})
    if written.level:
        told = told.with_measured(LEVEL, written.level)
    if module.told:
        told = told.with_measured("training", {"told": module.told})
    subject = _subject(state, written.converted.graph)
    placed = [PLACEMENT_FILE] if run.placed is not None else []
    files = [*written.files, *placed, CHECKPOINT_FILE, CONFIG_FILE]
    return ended(run, hand_over(run, data, conclude(run, subject, told, files), run.int8_name))


def _named(config: Config, ran: Sequence[Ran]) -> list[Ran]:
    """Returns the algorithms under their names in the configuration, if exactly those have run."""
    listed = algorithms_of(config.algorithm)
    if [type(one).__name__ for one in listed.values()] != [one.name for one in ran]:
        return list(ran)
    return [replace(one, name=name) for name, one in zip(listed, ran, strict=True)]


def other_sizes(converted: fx.GraphModule) -> list[dict[str, dict[int, int]]]:
    """Returns the sizes at which the model was traced in addition to those of the example.

    Each entry has the sizes of all dynamic axes except the batch, by input and axis.
    """
    names, axes = converted.meta["inputs"], converted.meta.get("free_axes", ())
    found: list[dict[str, dict[int, int]]] = []
    for number in range(max((len(axis.others) for axis in axes), default=0)):
        sizes: dict[str, dict[int, int]] = {}
        for axis in axes:
            for place, along in axis.places:
                sizes.setdefault(names[place], {})[along] = axis.others[min(number, len(axis.others) - 1)]
        found.append(sizes)
    return found


def float_on_purpose(module: QATModule, model: nn.Module) -> list[str]:
    """Returns globs for the operators that are float on purpose.

    These are the operators that the module leaves float, and the norms that an imported file computes by
    several operators. For an imported file the globs include the names of its nodes, which differ from the
    paths in the module if torch does not accept them.
    """
    given = model.norms_in_parts if isinstance(model, ImportedModel) else []
    return list(map(glob.escape, (*names_in_file(module.graph, module.left_float), *given)))


def _guards(config: Config, module: QATModule) -> dict[str, Any]:
    """Returns, as plain values, the choice of `reduce_range` and what its guard against saturation costs.

    The cost is given for each operator whose weights the guard limits.
    """
    return {
        "choice": config.backend.reduce_range,
        "hazard": module.backend.saturates,
        "asymmetric": module.backend.weight.has_zero_point,
        "backend": module.backend.name,
        "operators": {name: asdict(one) for name, one in guards(module.graph).items()},
    }


def _subject(state: State, converted: fx.GraphModule) -> Subject:
    """Returns the subject of the checks: the files, the simulation, the converted module and the control."""
    run, data, module, control = state.run, state.data, state.prepared, state.control
    device = accelerator(run.config.trainer)
    predictors = {"simulated": predictor(settled_graph(module.graph.to(device)), data.task)}
    if control is not None:
        predictors["control"] = predictor(settled_graph(control.graph.to(device)), data.task)
    return Subject(
        folder=run.folder,
        files={"float": run.files / FLOAT_FILE, "int8": run.files / run.int8_name},
        batches=lambda: data.test_subset_of(run.config.verify.images),
        timed=data.inputs.timed,
        settings=run.config.verify,
        options=module.backend.session_options,
        predictors=predictors,
        reference=ConvertedReference(converted),
        allow_float=float_on_purpose(module, state.model),
        other_runtime=module.backend.other_runtime,
        label=module.backend.label,
        labelled=data.labelled,
        progress=run.config.trainer.progress,
        sample=lambda images: data.test_subset(images, SAMPLE_BATCH),
        held_out=data.held_out_batches if data.held_out else None,
        task=data.task,
        states=data.states,
        sequences=data.sequences if data.states else None,
        sizes=other_sizes(converted),
        sound=data.recordings.as_dict() if data.recordings is not None else None,
    )
