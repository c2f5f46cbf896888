"""A float ONNX file that `quantize_file` has checked: run once on noise, quantized by a mode, verified, reported."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qatkit.config.compose import save_config
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.data.preprocessing import Preprocessing
from qatkit.export.read_float_file import FloatFile
from qatkit.jobs.by_mode import Made, finish, make, range_batches
from qatkit.jobs.verify import checks_of
from qatkit.progress import shown
from qatkit.records.preprocessing_file import preprocessing_beside
from qatkit.records.run_files import CONFIG_FILE, FLOAT_FILE, MODEL_FILE, file_name
from qatkit.run.build import held_out
from qatkit.run.folder import Run
from qatkit.run.memory import check_inputs
from qatkit.tasks import task_of
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError, one_line
from qatkit_verify.files import whole
from qatkit_verify.fitting import UNIT, sides
from qatkit_verify.session import open_session, run_images, run_outputs

_UPGRADE_TOLERANCE = 1e-3  # of the range of the outputs
# What a model.json leaves out where it is as usual.
_USUAL = {"fit": "crop", "channel_order": "RGB", "layout": "NCHW", "pixels": UNIT}
# Groups of the configuration that an ONNX file's run has no use for; all but `mode="static"` calibrate nothing.
_NO_PART = ("model", "quantizer", "algorithm", "schedule", "trainer", "checkpoint", "resume")


def quantized(config: Config, folder: Path, file: FloatFile, made: Path) -> int:
    """Quantizes the file, verifies and reports; returns as `qatkit.jobs.quantize_file.quantize`.

    Args:
        folder: of the run.
        file: as it was read.
        made: a temporary folder, with `file` as it was written.

    Raises:
        ConfigError: data, checks or a mode that don't fit the file.
    """
    mode = config.mode
    assert mode is not None
    run, data = Run(config, folder), _data(config, file)
    checks_of(config, labelled=data.labelled)
    shape = data.inputs.timed(file.shape[0] or 1)
    without = _NO_PART if mode == "static" else (*_NO_PART, "calibration")
    _check_output(config, file, made / FLOAT_FILE, data)
    with run.stage("quantize", f"quantizing: {mode}"):
        batches = _batches(config, file.shape[0], data)
        left = make(config, made / FLOAT_FILE, made / file_name(mode), shape, batches)
    run.folder.mkdir(parents=True, exist_ok=True)
    save_config(config, run.folder / CONFIG_FILE, without=without)
    for name in (FLOAT_FILE, file_name(mode)):
        with whole(run.files / name) as temporary:
            shutil.copyfile(made / name, temporary)
    notes = _notes(file, data, left.notes)
    return finish(run, data, Made(mode, file.path.name, shape, left.names, notes, without))


def _data(config: Config, file: FloatFile) -> DataModule:
    """The data, found to fit the file."""
    batch, channels = file.shape[0], file.image[0]
    source, beside = resolve(config.data.source, "data.source"), _beside(file)
    asked = config.data if beside else replace(config.data, image_size=file.size(config.data.image_size))
    data = DataModule(
        asked,
        source,
        config.seed,
        beside,
        progress=config.trainer.progress,
        held_out=held_out(config),
        task=task_of(config.task, config.verify.decision),
    )
    if data.of_arrays:
        allowed = "a source of pictures: train.py recipe=onnx_ptq onnx=FILE takes arrays"
        raise ConfigError("data.source", config.data.source, allowed)
    if channels not in (None, data.preprocessing.channels):
        given = list(data.preprocessing.mean)
        raise ConfigError(
            "data.mean", given, f"{channels} numbers: the input of {config.onnx} has {channels} channels"
        )
    check_inputs(config, data)
    chosen = config.calibration
    if config.mode == "static":
        data.check_calibration(chosen.images, batch or chosen.batch_size)
    return data


def _beside(file: FloatFile) -> Preprocessing | None:
    """The preprocessing in the model.json of the bundle that a file lies in, if it fits the file's input."""
    values = preprocessing_beside(file.path)
    if values is None:
        return None
    channels, height, width = file.image
    found = Preprocessing.from_dict(values)
    high, wide = sides(found.image_size)
    fits = height in (None, high) and width in (None, wide) and channels in (None, found.channels)
    return found if fits and file.layout == found.layout else None


def _check_output(config: Config, file: FloatFile, path: Path, data: DataModule) -> None:
    """One run on noise: the file runs, as it did before an upgrade, and gives the outputs that the task wants."""
    batch = file.shape[0] or 2  # a batch of one says nothing of one that is dynamic
    session = open_session(path, threads=config.verify.threads)
    images = np.random.default_rng(0).standard_normal((batch, *data.inputs.shape), dtype=np.float32)
    try:
        every = run_outputs(session, images)
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        shape = [batch, *data.inputs.shape]
        allowed = f"a model that runs on images {shape} ({one_line(error)})"
        raise ConfigError("onnx", config.onnx, allowed) from error
    outputs = np.asarray(every[0], np.float32)
    task, width = data.task, data.num_classes if data.labelled else None
    name = task.names.outputs
    if not task.fits(outputs.shape, batch, width):
        given = "it gives" if data.labelled else f"of {batch} images it gives"
        allowed = f"{name} {task.shape_text(width)}; {given} {list(outputs.shape)}"
        raise ConfigError("onnx", config.onnx, allowed)
    if not np.isfinite(outputs).all():
        raise ConfigError("onnx", config.onnx, f"finite {name}; on noise it gives NaN or infinity")
    data.task = task.suited(every, [one.name for one in session.get_outputs()], batch)
    if file.upgraded is not None:
        _check_upgrade(config, file, images, outputs, name)


def _check_upgrade(
    config: Config, file: FloatFile, images: NDArray[np.float32], outputs: NDArray[np.float32], name: str
) -> None:
    """The converter of opsets has mistakes of its own; the file as it was tells."""
    session = open_session(file.path, threads=config.verify.threads)
    difference = float(np.abs(run_images(session, images) - outputs).max())
    if difference > _UPGRADE_TOLERANCE * float(np.ptp(outputs)):
        reason = f"upgraded from {file.opset}, its {name} differ by {difference:.3g}"
        allowed = f"a file of opset {file.upgraded} or higher ({reason}): export it again"
        raise ConfigError("onnx", config.onnx, allowed)


def _batches(config: Config, batch: int | None, data: DataModule) -> Iterator[NDArray[np.float32]]:
    """What the mode measures ranges on; of the file's own size where that is fixed, and full."""
    if config.mode == "float16":
        return iter(range_batches(data, batch or 1))
    if config.mode != "static":
        return iter(())
    size = batch or config.calibration.batch_size
    batches = shown(
        data.calibration_batches(config.calibration.images, size), "calibrating", config.trainer.progress
    )
    return (torch.as_tensor(images).numpy() for images, _ in batches if batch in (None, len(images)))


def _notes(file: FloatFile, data: DataModule, more: Iterable[str]) -> list[str]:
    """What the reader of the report has to know of the file; printed too."""
    notes = []
    if file.upgraded is not None:
        notes.append(
            f"{file.path.name} has opset {file.opset}: upgraded to {file.upgraded} before it was quantized"
        )
    beside = _beside(file)
    if beside is not None and beside != data.preprocessing:
        told, used = beside.as_dict(), data.preprocessing.as_dict()
        keys = [key for key in {**told, **used} if told.get(key) != used.get(key)]
        notes.append(
            f"the {MODEL_FILE} beside {file.path.name} says {_listed(told, keys)}; "
            f"this run's images have {_listed(used, keys)}, and its accuracy is of those"
        )
    notes += [*data.notes, *more]
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    return notes


def _listed(values: Mapping[str, object], keys: Iterable[str]) -> str:
    return ", ".join(f"{key} {values.get(key, _USUAL.get(key))}" for key in keys)
