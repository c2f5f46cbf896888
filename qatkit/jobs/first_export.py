"""The first export of a run, before the long stages: finds shortfalls that calibration and training cannot fix.

    module ─ convert, export ─> file with arbitrary ranges ─ the checks that need only files ─> shortfalls

The int8 kernels of the operators and the size of the file depend on the graph and not on the ranges. They
are therefore checked here with the final bounds, and a missed bound ends the run, since it would be
missed after hours of training too. With `verify.audit=false` float operators are accepted, and no bound is
checked here.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from qatkit import report
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.export.add_integer_ends import to_integer_io
from qatkit.export.add_states import add_states
from qatkit.graph.captured import Captured
from qatkit.jobs import by_mode
from qatkit.jobs.stages import Always, State
from qatkit.jobs.verify import checks_of, float_on_purpose
from qatkit.records.results import Results
from qatkit.records.run_files import FLOAT_FILE, file_name
from qatkit.report.next_steps import lines, next_steps
from qatkit.run.build import examples
from qatkit.run.export import check_integer_ends, write_file, write_float_file
from qatkit.run.folder import Run, main_process
from qatkit.run.pace import of_first_file
from qatkit.train.module import QATModule
from qatkit.verify.checks.base import Check, Subject
from qatkit.verify.thresholds import shortfalls
from qatkit_verify.chunks import in_chunks, kept_db
from qatkit_verify.errors import ConfigError
from qatkit_verify.session import open_session, run_outputs
from qatkit_verify.stream import KEY, stream_file

_PROVEN, _ALIKE_DB = 4, 60.0  # number of samples, and the required agreement of both float files in dB
_STOPPED = (
    "stopped at the first export: nothing was calibrated, trained or written;"
    " set verify.audit=false to run to the end regardless"
)


class FirstExport(Always):
    """Exports a module for the first time, and ends the run if its file would miss a bound."""

    def run(self, state: State) -> State:
        goes_on = _try_module(state.run, state.captured, state.prepared, state.data)
        return state if goes_on else replace(state, status=1)


class FirstExportByMode(Always):
    """Quantizes the float file once by a mode of `qatkit.export.ort_modes`; otherwise as `FirstExport`."""

    def run(self, state: State) -> State:
        goes_on = _try_mode(state.run, state.captured, state.data)
        return state if goes_on else replace(state, status=1)


def _try_module(run: Run, model: Captured, module: QATModule, data: DataModule) -> bool:
    """Exports a prepared module once; returns whether the run can continue.

    Raises:
        ConfigError: the model cannot be exported, loaded, or trained as scheduled.
    """
    config, inputs = run.config, data.inputs
    with tempfile.TemporaryDirectory() as new:
        with run.stage("export_first", "exporting once, before the long stages"):
            module.check_gradients()
            files = {"int8": Path(new) / run.int8_name}
            converted = module.convert().graph
            write_file(converted, config, inputs, files["int8"])
            if config.export.io == "uint8":
                check_integer_ends(module)
                channels = data.preprocessing.channels
                to_integer_io(files["int8"], files["int8"], [0.0] * channels, [1.0] * channels, (-1.0, 1.0))
            judges_size = config.verify.audit and config.verify.max_size_ratio is not None
            if judges_size or config.export.stream:
                files["float"] = Path(new) / FLOAT_FILE
                write_float_file(model, config, inputs, files["float"])
            if config.export.stream:
                _prove_stream(files["float"], data, config.verify.threads)
            subject = Subject(
                folder=Path(new),
                files=files,
                batches=lambda: (),
                timed=inputs.timed,
                settings=config.verify,
                options=module.backend.session_options,
                allow_float=float_on_purpose(module, model.model),
                other_runtime=module.backend.other_runtime,
                label=module.backend.label,
                labelled=data.labelled,
                task=data.task,
            )
            goes_on = _go_on(config, subject)
        if goes_on and main_process():
            run.speeds = of_first_file(files["int8"], converted, config, inputs, subject.options)
        return goes_on


def _prove_stream(file: Path, data: DataModule, threads: int) -> None:
    """Checks that a float file computes the same for whole samples and for the same samples in chunks.

    Raises:
        ConfigError: its states cannot become inputs, or operators other than recurrent layers connect the
            chunks.
    """
    target = stream_file(file)
    add_states(file, target)
    whole, stream = (open_session(one, threads=threads) for one in (file, target))
    batch = data.first_batch(_PROVEN)
    kept = kept_db(run_outputs(whole, batch)[0], in_chunks(stream, batch)[0])
    if kept < _ALIKE_DB:
        told = f"the outputs for {_PROVEN} samples differ between chunks and whole samples ({kept:.1f} dB)"
        why = "operators other than LSTM, GRU and RNN, such as a convolution or a mean, connect the frames"
        raise ConfigError(KEY, True, reason=f"{told}, since {why}; set export.stream=false")


def _try_mode(run: Run, model: Captured, data: DataModule) -> bool:
    """Quantizes a float file once; returns whether the run can continue."""
    config, mode = run.config, run.config.export.mode
    with (
        run.stage("export_first", "exporting once, before the long stages"),
        tempfile.TemporaryDirectory() as new,
    ):
        folder = Path(new)
        write_float_file(model, config, data.inputs, folder / FLOAT_FILE)
        given = data.inputs.timed(examples(config))
        left = by_mode.make(config, folder / FLOAT_FILE, folder / file_name(mode), given)
        made = by_mode.Made(mode, config.model.name, given, left.names)
        subject = by_mode.subject_of(config, folder, made, data)
        return _go_on(config, replace(subject, labelled=data.labelled))


def _go_on(config: Config, subject: Subject) -> bool:
    """Runs the checks that need no images, and reports shortfalls as at the end of a run.

    Returns:
        Whether the run can continue; True without any check if `verify.audit` is false.
    """
    if not config.verify.audit:
        return True
    checks = [check for check in checks_of(config, labelled=subject.labelled) if check.early]
    results = _measured(config, subject, checks)
    if results.shortfalls and main_process():
        report.print_report(results, checks=checks)
        print(_STOPPED, flush=True)
        for line in lines(next_steps(results)):
            print(line, flush=True)
    return not results.shortfalls


def _measured(config: Config, subject: Subject, checks: list[Check]) -> Results:
    results = Results(config.name, config.model.name, "", label=subject.label, labelled=subject.labelled,
                      task=subject.task.names, config=asdict(config))  # fmt: skip
    for check in checks:
        results = check.measure(subject, results)
    found = shortfalls(checks, config.verify, results)
    return replace(results, shortfalls=[one.line for one in found], fixes=[one.fixes for one in found])
