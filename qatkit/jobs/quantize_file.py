"""Does with a user's ONNX file what `mode` says; a quantized file is verified and reported like that of train.py.

    clean, summary, encodings                    `qatkit.jobs.clean_file`, `qatkit.jobs.summarize_file`,
                                                 `qatkit.jobs.encodings_file`
    static, and weight_only with weights.bits    float file → check → `qatkit.jobs.pipeline`, which imports it and
                                                 writes it back
    the other modes                              float file → check, upgrade → `qatkit.jobs.float_file` →
                                                 `qatkit.jobs.by_mode`

This module checks the settings and the file before torch is imported, so that an unusable file is rejected at
once.

The other modes (dynamic, float16, and weight_only without weights.bits) make no `QATModule`. Their reports
therefore have no simulation and no float control. Parity compares the new file with the float file, and the new
file's results with and without ONNX Runtime's optimizations.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from qatkit.config.compose import load_config
from qatkit.config.data_folders import FOLDERS, data_folder
from qatkit.config.rules import validate
from qatkit.config.schema import BackendConfig, CleanConfig, Config, ModelConfig, ScheduleConfig, VerifyConfig
from qatkit.config.schema.files import CLEAN, ENCODINGS, SUMMARY
from qatkit.config.schema.model import AUDIO, DRAWN, RECORDINGS, TEXTS
from qatkit.config.selectors import refuse_selectors
from qatkit.encryption.vault import protected
from qatkit.importing.float_file import FloatFile, for_tools, layout_of, read_float_file
from qatkit.jobs.clean_file import clean_file, cleaned_before
from qatkit.records.run_files import CONFIG_FILE, FLOAT_FILE, REPORT_FILE, file_name
from qatkit.run.backend import backend_of
from qatkit.run.find import output_dir
from qatkit.run.lock import locked
from qatkit_verify.errors import ConfigError

_MODEL = "onnx/"  # prefix of the model names of files (`qatkit.models.onnx_files`)
_WEIGHTS_ALONE, _BLOCK = "qatkit.quant.backends.WEIGHT_ONLY", 32
_CALIBRATED = ScheduleConfig(epochs=0, float_epochs=0, distill=0.0, batch_norm="fold", enable_fake_quant=0.0)
# Data sources of qatkit. Their samples are pictures except for those of `_ARRAYS`; the samples of a user's
# source are known only after its call.
_OURS, _ARRAYS = "qatkit.data.", ("qatkit.data.arrays.", AUDIO, DRAWN, *TEXTS, *RECORDINGS)


def quantize(config: Config) -> int:
    """Quantizes, cleans or describes `config.onnx`, as `config.mode` says.

    Returns 0, or 1 if a quantized file misses a bound or its bundle cannot be published.

    Raises:
        ConfigError: the user has made a mistake; it is raised before long work, and no quantized file is written.
    """
    if config.mode == SUMMARY:
        from qatkit.jobs.summarize_file import summarize_file

        return summarize_file(config, output_dir(config))
    if config.mode == ENCODINGS:
        from qatkit.jobs.encodings_file import write_encodings

        return write_encodings(config, output_dir(config))
    assert config.mode is not None
    if config.mode == CLEAN:
        return clean_file(config, _new_folder(config, file_name(CLEAN)))
    if config.clean != CleanConfig():
        config = cleaned_before(config, _new_folder(config, file_name(config.mode)))
    return _by_graph(config) if config.mode == "static" or _packs(config) else by_tools(config)


def as_run(config: Config) -> Config:
    """Returns the configuration with which train.py imports the file and calibrates it without training."""
    model = ModelConfig(name=f"{_MODEL}{config.onnx}", kwargs=config.model.kwargs)
    task = config.task
    if task == "classification" and config.verify.decision != VerifyConfig().decision:
        task = "outputs"  # the only task for which verify.decision applies
    backend = _packed_backend(config) if _packs(config) else config.backend
    return replace(config, onnx=None, model=model, schedule=_CALIBRATED, task=task, backend=backend)


def _packs(config: Config) -> bool:
    """Returns whether low-bit weights are requested."""
    return config.mode == "weight_only" and config.weights.bits is not None


def _packed_backend(config: Config) -> BackendConfig:
    """Returns the weight-only backend with the settings of `config.weights`."""
    asked = config.weights
    block = _BLOCK if asked.block is None else asked.block
    return BackendConfig(
        target=_WEIGHTS_ALONE,
        weight_dtype=f"int{asked.bits}",
        weight_granularity=block if isinstance(block, str) else {"block": block},
        weight_symmetric=bool(asked.symmetric),
        weight_scale_dtype=asked.scale_dtype,
        overrides=config.backend.overrides,
        exclude=config.backend.exclude,
        only=config.backend.only,
        subgraphs=config.backend.subgraphs,
    )


def _by_graph(config: Config) -> int:
    """Runs the stages of train.py with the file as the model."""
    validate(config)
    config = replace(config, verify=replace(config.verify))  # a copy: a fixed batch sets latency_batch
    assert config.onnx is not None and config.mode is not None
    folder = _new_folder(config, file_name(config.mode))
    with protected(config.export.encrypt):
        file = _read(config)
        _check_runs(file)
        from qatkit.jobs import float_file, pipeline

        run, notes = float_file.with_task(as_run(config), file)
    batch = file.inputs[0].shape[0] if _of_pictures(config) else None
    if batch not in (None, 1):
        run = _of_batch(run, batch)
    resume = "auto" if list(folder.glob("*.ckpt")) else None
    return pipeline.train(replace(run, output_dir=str(folder), resume=resume), notes=notes)


def _of_batch(run: Config, batch: int) -> Config:
    """Returns the configuration for a file with a fixed batch size, which the new file keeps.

    The number of calibration images is rounded down to whole batches.
    """
    whole = run.calibration.images // batch * batch
    calibration = replace(run.calibration, images=whole, batch_size=batch)
    return replace(run, calibration=calibration, export=replace(run.export, dynamic_batch=False))


def by_tools(config: Config) -> int:
    """Quantizes `config.onnx` by ONNX Runtime's tools. With `mode="static"`, this is the first rung of a rescue.

    Returns 0, or 1 if the file misses a bound or its bundle cannot be published.

    Raises:
        ConfigError: the user has made a mistake, as in `quantize`.
    """
    validate(config)
    config = replace(config, verify=replace(config.verify))  # a copy: a fixed batch sets latency_batch
    assert config.onnx is not None and config.mode is not None
    folder = _new_folder(config, file_name(config.mode))
    with _prepared(config, folder) as (file, made):
        from qatkit.jobs.float_file import quantized

        return quantized(config, folder, file, made)


@contextmanager
def _prepared(config: Config, folder: Path) -> Iterator[tuple[FloatFile, Path]]:
    """Yields the upgraded file and a temporary folder that contains it; locks the run's folder within the context."""
    with (
        protected(config.export.encrypt),
        locked(folder),
        tempfile.TemporaryDirectory() as made,
    ):
        file = for_tools(_read(config), config.export.opset)
        file.write(Path(made) / FLOAT_FILE)
        yield file, Path(made)


def _new_folder(config: Config, name: str) -> Path:
    """Returns the run's folder, in which a file called `name` will be written.

    The folder may contain an earlier, unfinished attempt of the same run.

    Raises:
        ConfigError: the folder contains a finished run, or files of a run with another file or mode.
    """
    folder, begun = output_dir(config), False
    for existing in (FLOAT_FILE, name):
        if (folder / existing).exists() and not (begun := begun or _begun(config, folder)):
            raise ConfigError(
                "output_dir", folder, reason=f"the folder holds a {existing}; choose another folder"
            )
    other = list(folder.glob("*.ckpt")) and not _begun(config, folder)
    if (folder / REPORT_FILE).exists() or other:
        raise ConfigError("output_dir", folder, reason="the folder holds another run; choose another folder")
    return folder


def _begun(config: Config, folder: Path) -> bool:
    """Returns whether the folder belongs to an attempt of this run: its config.yaml names the same file and mode."""
    try:
        before = load_config(folder / CONFIG_FILE)
    except ConfigError:
        return False
    onnx = before.model.name.removeprefix(_MODEL) if before.onnx is None else before.onnx
    return (onnx, before.mode) == (config.onnx, config.mode)


def _read(config: Config) -> FloatFile:
    """Returns the file after checking that the settings suit it."""
    assert config.onnx is not None and config.mode is not None
    if config.mode != "static" and not _packs(config):
        refuse_selectors(config.backend, f"mode={config.mode}")
    if config.verify.control:
        raise ConfigError(
            "verify.control", True, "false with onnx=FILE, since an ONNX file is not fine-tuned"
        )
    if config.backend.reduce_range is True and config.mode in ("float16", "weight_only"):
        allowed = f"false with mode={config.mode}, which multiplies in float"
        raise ConfigError("backend.reduce_range", True, allowed)
    backend_of(as_run(config))
    _use_library(config.model.kwargs)
    if config.data.source in FOLDERS:
        data_folder(config.data.source, config.data.root)
    file = read_float_file(Path(config.onnx), config.model.kwargs.get("fix"))
    if _of_pictures(config):
        _check_images(config, file)
    return file


def _of_pictures(config: Config) -> bool:
    """Returns whether the samples are known to be pictures; those of a user's source are known only after its call."""
    source = config.data.source
    return source.startswith(_OURS) and not source.startswith(_ARRAYS)


def _use_library(options: dict[str, Any]) -> None:
    """Checks the keys of `model.kwargs`, and registers a library of custom operators.

    Raises:
        ConfigError: `onnx=FILE` has no such key, or the library cannot be used.
    """
    for key in options.keys() - {"fix", "states", "custom_ops"}:
        reason = "the key does not exist; onnx=FILE has fix, states and custom_ops"
        raise ConfigError(f"model.kwargs.{key}", options[key], reason=reason)
    if options.get("custom_ops") is not None:
        from qatkit_verify.session import use_library

        try:
            use_library(options["custom_ops"])
        except ConfigError as error:
            key, value = "model.kwargs.custom_ops", options["custom_ops"]
            raise ConfigError(key, value, reason=error.problem) from error


def _check_images(config: Config, file: FloatFile) -> None:
    """Rejects settings that do not suit the file's images; a fixed batch size becomes the latency batch."""
    image = file.images(layout_of(file.path, config.data.layout))
    image.size(config.data.image_size, config.onnx)
    batch, verify = image.shape[0], config.verify
    if batch not in (None, verify.latency_batch):
        if verify.latency_batch != VerifyConfig().latency_batch:
            allowed = f"{batch}, the fixed batch size of {config.onnx}"
            raise ConfigError("verify.latency_batch", verify.latency_batch, allowed)
        verify.latency_batch = batch
    images = config.calibration.images
    if config.mode == "static" and batch is not None and batch > images:
        raise ConfigError("calibration.images", images, f"at least {batch}, the batch size of the file")


def _check_runs(file: FloatFile) -> None:
    """Rejects a file that ONNX Runtime cannot load."""
    from qatkit.encryption.vault import readable
    from qatkit_verify.session import open_session

    with readable(file.path) as plain:
        try:
            open_session(plain, threads=1, optimize=False)
        except ConfigError as error:
            raise ConfigError("onnx", file.path, reason=error.problem) from error
