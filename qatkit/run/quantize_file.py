"""A user's float ONNX file: checked, upgraded, quantized by a mode, verified and reported like a trained model.

    float file → check, upgrade → `qatkit.run.by_mode`

What needs a module is absent from the report: no simulation, no control, and parity compares the file with
itself, optimizations on against off, and with the float file.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qatkit.bundle import (
    CONFIG_FILE,
    FLOAT_FILE,
    MODEL_FILE,
    REPORT_FILE,
    file_name,
    preprocessing_beside,
)
from qatkit.config.compose import load_config, save_config
from qatkit.config.limits import validate
from qatkit.config.schema import Config, VerifyConfig
from qatkit.data import DataModule
from qatkit.data.preprocessing import Preprocessing
from qatkit.encryption.vault import protected
from qatkit.export.read_float_file import FloatFile, read_float_file
from qatkit.progress import shown
from qatkit.run.build import backend_of, held_out
from qatkit.run.by_mode import Made, finish, make
from qatkit.run.find import output_dir
from qatkit.run.folder import Run
from qatkit.run.limits import check_inputs
from qatkit.run.lock import locked
from qatkit.run.verify import checks_of
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import whole
from qatkit_verify.session import open_session, run_images

_UPGRADE_TOLERANCE = 1e-3  # of the range of the logits
# Groups of the configuration that an ONNX file's run has no use for; all but `mode="static"` calibrate nothing.
_NO_PART = ("model", "quantizer", "algorithm", "schedule", "trainer", "checkpoint", "resume")


def quantize(config: Config) -> int:
    """Quantizes `config.onnx` by `config.mode`. Returns 0, or 1 when the file falls short of a bound.

    Raises:
        ConfigError: anything that the user can put right, before any long work; nothing is written.
    """
    validate(config)
    config = replace(config, verify=replace(config.verify))  # a fixed batch becomes that of the latency
    assert config.onnx is not None and config.mode is not None
    run = Run(config, _new_folder(config))
    with protected(config.export.encrypt), locked(run.folder):
        return _quantized(run)


def _quantized(run: Run) -> int:
    config, mode = run.config, run.config.mode
    assert mode is not None
    file, data = _read(config)
    checks_of(config, labelled=data.labelled)
    shape = (file.shape[0] or 1, *data.input_shape)
    without = _NO_PART if mode == "static" else (*_NO_PART, "calibration")
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder)
        file.write(new / FLOAT_FILE)
        _check_output(config, file, new / FLOAT_FILE, data)
        with run.stage("quantize", f"quantizing: {mode}"):
            batches = _calibration(config, file.shape[0], data)
            left = make(config, new / FLOAT_FILE, new / file_name(mode), shape, batches)
        run.folder.mkdir(parents=True, exist_ok=True)
        save_config(config, run.folder / CONFIG_FILE, without=without)
        for name in (FLOAT_FILE, file_name(mode)):
            with whole(run.files / name) as temporary:
                shutil.copyfile(new / name, temporary)
    made = Made(mode, file.path.name, shape, left, _notes(file, data), without)
    return finish(run, data, made)


def _new_folder(config: Config) -> Path:
    folder = output_dir(config)
    if (folder / REPORT_FILE).exists() or list(folder.glob("*.ckpt")):
        raise ConfigError("output_dir", folder, "holds another run; name another folder")
    assert config.onnx is not None and config.mode is not None
    for name in (FLOAT_FILE, file_name(config.mode)):
        if (folder / name).exists() and not _begun(config, folder):
            raise ConfigError("output_dir", folder, f"holds a {name}; name another folder")
    return folder


def _begun(config: Config, folder: Path) -> bool:
    """Whether it was this run that was stopped there, which is begun again."""
    try:
        before = load_config(folder / CONFIG_FILE)
    except ConfigError:
        return False
    return (before.onnx, before.mode) == (config.onnx, config.mode)


def _read(config: Config) -> tuple[FloatFile, DataModule]:
    """The file and the data, each checked and found to fit the other."""
    assert config.onnx is not None
    if config.backend.overrides:
        raise ConfigError("backend.overrides", ", ".join(config.backend.overrides), "{}: not with onnx=FILE")
    if config.verify.control:
        raise ConfigError("verify.control", True, "false: nothing is fine-tuned of an ONNX file")
    backend_of(config)
    file = read_float_file(Path(config.onnx), config.export.opset)
    batch, channels, height, width = file.shape
    size = height or width
    if size is not None and config.data.image_size not in (None, size):
        raise ConfigError(
            "data.image_size", config.data.image_size, f"null or {size}, the input of {config.onnx}"
        )
    if batch not in (None, config.verify.latency_batch):
        if config.verify.latency_batch != VerifyConfig().latency_batch:
            allowed = f"{batch}, the fixed batch of {config.onnx}"
            raise ConfigError("verify.latency_batch", config.verify.latency_batch, allowed)
        config.verify.latency_batch = batch
    source, beside = resolve(config.data.source, "data.source"), _beside(file)
    asked = config.data if beside else replace(config.data, image_size=size or config.data.image_size)
    data = DataModule(
        asked, source, config.seed, beside, progress=config.trainer.progress, held_out=held_out(config)
    )
    if channels not in (None, data.input_shape[0]):
        given = list(data.preprocessing.mean)
        raise ConfigError(
            "data.mean", given, f"{channels} numbers: the input of {config.onnx} has {channels} channels"
        )
    check_inputs(config, data)
    chosen = config.calibration
    if config.mode == "static":
        if batch is not None and batch > chosen.images:
            raise ConfigError("calibration.images", chosen.images, f"at least {batch}, the file's batch")
        data.check_calibration(chosen.images, batch or chosen.batch_size)
    if config.backend.reduce_range is True and config.mode in ("float16", "weight_only"):
        allowed = f"false with mode={config.mode}, which multiplies in float"
        raise ConfigError("backend.reduce_range", True, allowed)
    return file, data


def _beside(file: FloatFile) -> Preprocessing | None:
    """The preprocessing in the model.json of the bundle that a file lies in, if it fits the file's input."""
    values = preprocessing_beside(file.path)
    if values is None:
        return None
    _, channels, height, width = file.shape
    found = Preprocessing.from_dict(values)
    fits = {height, width} <= {None, found.image_size} and channels in (None, found.channels)
    return found if fits else None


def _check_output(config: Config, file: FloatFile, path: Path, data: DataModule) -> None:
    """One run on noise: the file runs, as it did before an upgrade, and gives one logit for each class of the data."""
    batch = file.shape[0] or 2  # a batch of one says nothing of one that is dynamic
    session = open_session(path, threads=config.verify.threads)
    images = np.random.default_rng(0).standard_normal((batch, *data.input_shape), dtype=np.float32)
    try:
        logits = run_images(session, images)
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        reason = str(error).strip().splitlines()[0][:160]
        shape = [batch, *data.input_shape]
        raise ConfigError("onnx", config.onnx, f"a model that runs on images {shape} ({reason})") from error
    if not data.labelled and (logits.ndim < 2 or len(logits) != batch):
        allowed = f"logits [N, classes]; of {batch} images it gives {list(logits.shape)}"
        raise ConfigError("onnx", config.onnx, allowed)
    if data.labelled and logits.shape != (batch, data.num_classes):
        allowed = (
            f"logits [N, {data.num_classes}], one for each class of the data; it gives {list(logits.shape)}"
        )
        raise ConfigError("onnx", config.onnx, allowed)
    if not np.isfinite(logits).all():
        raise ConfigError("onnx", config.onnx, "finite logits; on noise it gives NaN or infinity")
    if file.upgraded is not None:
        _check_upgrade(config, file, images, logits)


def _check_upgrade(
    config: Config, file: FloatFile, images: NDArray[np.float32], logits: NDArray[np.float32]
) -> None:
    """The converter of opsets has mistakes of its own; the file as it was tells."""
    session = open_session(file.path, threads=config.verify.threads)
    difference = float(np.abs(run_images(session, images) - logits).max())
    if difference > _UPGRADE_TOLERANCE * float(np.ptp(logits)):
        reason = f"upgraded from {file.opset}, its logits differ by {difference:.3g}"
        allowed = f"a file of opset {file.upgraded} or higher ({reason}): export it again"
        raise ConfigError("onnx", config.onnx, allowed)


def _calibration(config: Config, batch: int | None, data: DataModule) -> Iterator[NDArray[np.float32]]:
    """Batches [N, C, H, W]; of the file's own size where that is fixed, without a last part of one."""
    if config.mode != "static":
        return iter(())
    size = batch or config.calibration.batch_size
    batches = shown(
        data.calibration_batches(config.calibration.images, size), "calibrating", config.trainer.progress
    )
    return (torch.as_tensor(images).numpy() for images, _ in batches if batch in (None, len(images)))


def _notes(file: FloatFile, data: DataModule) -> list[str]:
    """What the reader of the report has to know of the file; printed too."""
    notes = []
    if file.upgraded is not None:
        notes.append(
            f"{file.path.name} has opset {file.opset}: upgraded to {file.upgraded} before it was quantized"
        )
    beside = _beside(file)
    if beside is not None and beside != data.preprocessing:
        told, used = beside.as_dict(), data.preprocessing.as_dict()
        keys = [key for key in told if told[key] != used[key]]
        notes.append(
            f"the {MODEL_FILE} beside {file.path.name} says {_listed(told, keys)}; "
            f"this run's images have {_listed(used, keys)}, and its accuracy is of those"
        )
    notes += data.notes
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    return notes


def _listed(values: Mapping[str, object], keys: Iterable[str]) -> str:
    return ", ".join(f"{key} {values[key]}" for key in keys)
