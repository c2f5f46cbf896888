"""Quantizes a float ONNX file that `quantize_file` has checked: runs it once, quantizes, verifies and reports it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qatkit.config.argv import left_open
from qatkit.config.compose import save_config
from qatkit.config.schema import Config, VerifyConfig
from qatkit.data import DataModule
from qatkit.encryption.vault import readable
from qatkit.importing.float_file import FloatFile, layout_of
from qatkit.jobs.by_mode import Made, finish, make, range_batches
from qatkit.jobs.quantize_file import as_run
from qatkit.jobs.verify import checks_of, planned_verification
from qatkit.progress import shown
from qatkit.records.run_files import CONFIG_FILE, FLOAT_FILE, file_name
from qatkit.run.build import opened_data
from qatkit.run.folder import Run
from qatkit.run.memory import check_inputs
from qatkit.run.pace import Pace
from qatkit.run.plan import announce, stage
from qatkit.run.timing import Span, timed
from qatkit.tasks import task_of
from qatkit_verify.errors import ConfigError, counted, one_line
from qatkit_verify.feeds import Array, by_name, input_names, rows
from qatkit_verify.files import whole
from qatkit_verify.session import open_session, run_outputs

_UPGRADE_TOLERANCE = 1e-3  # tolerance relative to the range of the outputs
# Groups of the configuration that have no effect on an ONNX file. Only `mode="static"` calibrates.
_NO_PART = ("model", "quantizer", "algorithm", "schedule", "trainer", "checkpoint", "resume")
_CLASSES, _ANY = "classification", "outputs"  # names of tasks


def quantized(config: Config, folder: Path, file: FloatFile, made: Path) -> int:
    """Quantizes, verifies and reports the file.

    Returns 0, or 1 if the new file misses a bound or its bundle cannot be published.

    Args:
        config: the configuration.
        folder: the folder of the run.
        file: the file as it was read.
        made: a temporary folder in which `file` has been written.

    Raises:
        ConfigError: the data, the checks or the mode do not suit the file.
    """
    mode = config.mode
    assert mode is not None
    data = _data(config, file)
    batch = None if data.of_arrays else file.inputs[0].shape[0]
    config, notes, seconds = _checked(config, file, made / FLOAT_FILE, data, batch)
    run = Run(config, folder)
    checks_of(config, labelled=data.labelled)
    given = data.inputs.timed(batch or 1)
    without = _NO_PART if mode == "static" else (*_NO_PART, "calibration")
    pace = Pace(config, data, None, None, {"float": seconds})
    quantizing = stage(
        "quantize", f"{mode}, by ONNX Runtime's tools", "it depends on the size of the weights"
    )
    rows = [quantizing, *planned_verification(config, data, pace, ["float", "int8"])]
    announce(run, rows, crowded=pace.crowded)
    with run.stage("quantize", f"quantizing: {mode}"):
        left = make(config, made / FLOAT_FILE, made / file_name(mode), given, _batches(config, batch, data))
    run.folder.mkdir(parents=True, exist_ok=True)
    save_config(config, run.folder / CONFIG_FILE, without=without)
    for name in (FLOAT_FILE, file_name(mode)):
        with whole(run.files / name) as temporary:
            shutil.copyfile(made / name, temporary)
    notes = [*_upgrade_note(file), *notes, *data.notes, *left.notes]
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    return finish(run, data, Made(mode, file.path.name, given, left.names, notes, without))


def with_task(config: Config, file: FloatFile) -> tuple[Config, tuple[str, ...]]:
    """Chooses the task of a run that imports a file, by the run's data and the file's outputs.

    The default task "classification" becomes "outputs" if the file does not return logits of classes. Any other
    task is kept.

    Returns:
        The configuration with this task, and notes for the report.

    Raises:
        ConfigError: the data cannot be opened, or the file does not run on them.
    """
    if config.task != _CLASSES:
        return config, ()
    data = opened_data(config)
    with readable(file.path) as plain:
        session = open_session(plain, threads=config.verify.threads)
    names = [one.name for one in file.inputs]
    try:
        outputs = run_outputs(session, by_name(names, data.first_batch(1)) | dict(file.fixed))
    except ConfigError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        raise _does_not_run(file, data, data.inputs.text, error) from error
    config = replace(config, task=_task_for(config, data, outputs))
    return config, _unused_labels(config, data, outputs[0], 1)


def _data(config: Config, file: FloatFile) -> DataModule:
    """Returns the data after checking that they suit the file."""
    data = opened_data(as_run(config))
    if not data.of_arrays:
        file.images(layout_of(file.path, config.data.layout))
    check_inputs(config, data)
    chosen = config.calibration
    if config.mode == "static":
        batch = None if data.of_arrays else file.inputs[0].shape[0]
        adapt = batch is None and left_open("calibration.batch_size")
        data.check_calibration(chosen.images, batch or data.rows(chosen.batch_size), adapt=adapt)
    return data


def _checked(
    config: Config, file: FloatFile, path: Path, data: DataModule, batch: int | None
) -> tuple[Config, list[str], Span]:
    """Runs the file once and checks that its outputs suit the task.

    A file that was converted to a newer opset is compared with the original.

    Returns:
        The configuration with the task that suits the outputs, notes for the report, and the file's time per
        sample.
    """
    session = open_session(path, threads=config.verify.threads)
    given, outputs = _outputs(session, file, data, batch)
    first, count = outputs[0], rows(given)
    asked = config.task
    config = replace(config, task=_task_for(config, data, outputs))
    notes = list(_unused_labels(config, data, first, count))
    if config.task != asked:
        data.task = task_of(config.task, config.verify.decision)
    task = data.task
    width, name = data.num_classes if data.labelled else None, task.names.outputs
    if not task.fits(first.shape, count, width):
        told = "it returned" if data.labelled else f"for {counted(count, 'sample')} it returned"
        allowed = f"a model that returns {name} {task.shape_text(width)}; {told} {list(first.shape)}"
        raise ConfigError("onnx", config.onnx, allowed)
    if not np.isfinite(first).all():
        on = "the first samples" if data.of_arrays else "noise"
        raise ConfigError(
            "onnx", config.onnx, f"a model with finite {name}; for {on} it returned NaN or infinity"
        )
    data.task = task.suited(outputs, [one.name for one in session.get_outputs()], count)
    if file.upgraded is not None:
        _check_upgrade(config, file, session, data, given)
    return config, notes, timed(lambda: run_outputs(session, given)).times(1 / max(1, count))


def _outputs(
    session: Any, file: FloatFile, data: DataModule, batch: int | None
) -> tuple[Any, Sequence[Array]]:
    """Returns a batch and the file's outputs for it; the batch is a single sample if the file accepts no larger one.

    Raises:
        ConfigError: the file runs on no batch.
    """
    while True:
        count = data.rows(batch or 2)  # a batch of one does not show whether the batch is dynamic
        given = data.first_batch(count) if data.of_arrays else _noise(count, data)
        try:
            found = run_outputs(session, given)
        except Exception as error:  # ONNX Runtime's exceptions have no public common base
            if data.one_at_a_time():
                continue
            text = data.inputs.text if data.of_arrays else f"images {list(given.shape)}"
            raise _does_not_run(file, data, text, error) from error
        by_sample = found[0].ndim > 0 and len(found[0]) % count == 0
        if by_sample or not data.one_at_a_time():
            return given, found


def _noise(count: int, data: DataModule) -> Array:
    return np.random.default_rng(0).standard_normal((count, *data.inputs.shape), dtype=np.float32)


def _does_not_run(file: FloatFile, data: DataModule, inputs: str, error: Exception) -> ConfigError:
    reason = f"ONNX Runtime failed on {inputs} ({one_line(error)}){data.splits.advice}"
    return ConfigError("onnx", file.path, reason=reason)


def _task_for(config: Config, data: DataModule, outputs: Sequence[Array]) -> str:
    """Returns the name of the configured task, but "outputs" if it is "classification" and does not suit the file.

    Classification suits if no `verify.decision` is set and the first output may have the logits of the classes.
    """
    if config.task != _CLASSES or config.verify.decision != VerifyConfig().decision:
        return config.task if config.task != _CLASSES else _ANY
    alone = data.labelled or (len(outputs) == 1 and not data.of_arrays)
    return _CLASSES if alone and outputs[0].ndim == 2 and outputs[0].dtype.kind == "f" else _ANY


def _unused_labels(config: Config, data: DataModule, first: Array, count: int) -> tuple[str, ...]:
    """Returns a note if the data have labels with which the file's first output cannot be compared."""
    if config.task != _ANY or not data.labelled:
        return ()
    return (
        f"the first output ({list(first.shape)} for {counted(count, 'sample')}) does not contain "
        "the logits of the classes, so it is "
        "measured as with task=outputs, without the labels",
    )


def _check_upgrade(config: Config, file: FloatFile, session: Any, data: DataModule, given: Any) -> None:
    """Compares an upgraded file with the original, since the opset converter may make mistakes."""
    given = data.first_batch(1) if file.fixed else given  # inputs of fixed size have no rows
    named = by_name(input_names(session), given)
    with readable(file.path) as plain:
        before = open_session(plain, threads=config.verify.threads)
    pairs = zip(run_outputs(before, named | dict(file.fixed)), run_outputs(session, named), strict=True)
    for (exact, found), output in zip(pairs, session.get_outputs(), strict=True):
        if exact.dtype.kind != "f" or np.array_equal(exact, found, equal_nan=True):
            continue
        difference = _largest_difference(exact, found)
        if not difference <= _UPGRADE_TOLERANCE * float(np.ptp(exact[np.isfinite(exact)])):
            alone = len(session.get_outputs()) == 1
            differs = f"{data.task.names.outputs} differ" if alone else f"output '{output.name}' differs"
            reason = f"after the upgrade from opset {file.opset}, its {differs} by {difference:.3g}"
            allowed = f"a file exported with opset {file.upgraded} or higher ({reason})"
            raise ConfigError("onnx", config.onnx, allowed)


def _largest_difference(exact: Array, found: Array) -> float:
    """Returns the largest difference of finite values; infinity for different shapes, or if no value is finite."""
    if exact.shape != found.shape or not (known := np.isfinite(exact) & np.isfinite(found)).any():
        return float("inf")
    return float(np.abs(exact[known].astype(np.float64) - found[known]).max())


def _batches(config: Config, batch: int | None, data: DataModule) -> Iterable[Any]:
    """Returns the batches on which the mode measures ranges; () for modes that measure none.

    If the file has a fixed batch size, all batches have this size.
    """
    if config.mode == "float16":
        return range_batches(data, batch or 1)
    return _Calibration(config, batch, data) if config.mode == "static" else ()


@dataclass(frozen=True)
class _Calibration:
    """The calibration batches, which are read again in each iteration; `batch` is the fixed batch size of the file."""

    config: Config
    batch: int | None
    data: DataModule

    def __iter__(self) -> Iterator[Any]:
        size = self.batch or self.config.calibration.batch_size
        loader = self.data.calibration_batches(self.config.calibration.images, size)
        batches = shown(loader, "calibrating", self.config.trainer.progress)
        return (samples for samples, _ in batches if self.batch is None or len(samples) == size)


def _upgrade_note(file: FloatFile) -> Iterable[str]:
    if file.upgraded is not None:
        yield f"{file.path.name} has opset {file.opset} and was upgraded to {file.upgraded} before quantization"
