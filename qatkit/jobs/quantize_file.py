"""A user's float ONNX file: checked, upgraded, quantized by a mode, verified and reported like a trained model.

    float file → check, upgrade → `qatkit.jobs.float_file` → `qatkit.jobs.by_mode`

What needs a module is absent from the report: no simulation, no control, and parity compares the file with
itself, optimizations on against off, and with the float file.

Here is what can be said of the settings and of the file by themselves. torch is imported once nothing is wrong with
them: a file that can't be used is refused at once.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from qatkit.config.compose import load_config
from qatkit.config.rules import validate
from qatkit.config.schema import Config, VerifyConfig
from qatkit.encryption.vault import protected
from qatkit.export.read_float_file import FloatFile, read_float_file
from qatkit.records.preprocessing_file import preprocessing_beside
from qatkit.records.run_files import CONFIG_FILE, FLOAT_FILE, REPORT_FILE, file_name
from qatkit.run.backend import backend_of
from qatkit.run.find import output_dir
from qatkit.run.lock import locked
from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import as_typed


def quantize(config: Config) -> int:
    """Quantizes `config.onnx` by `config.mode`. Returns 0, or 1 when the file falls short of a bound.

    Raises:
        ConfigError: anything that the user can put right, before any long work; nothing is written.
    """
    validate(config)
    config = replace(config, verify=replace(config.verify))  # a fixed batch becomes that of the latency
    assert config.onnx is not None and config.mode is not None
    folder = _new_folder(config)
    with (
        protected(config.export.encrypt),
        locked(folder),
        tempfile.TemporaryDirectory() as made,
    ):
        file = _read(config)
        file.write(Path(made) / FLOAT_FILE)
        from qatkit.jobs.float_file import quantized

        return quantized(config, folder, file, Path(made))


def _new_folder(config: Config) -> Path:
    folder = output_dir(config)
    if (folder / REPORT_FILE).exists() or list(folder.glob("*.ckpt")):
        raise ConfigError("output_dir", folder, reason="the folder holds another run; choose another folder")
    assert config.onnx is not None and config.mode is not None
    for name in (FLOAT_FILE, file_name(config.mode)):
        if (folder / name).exists() and not _begun(config, folder):
            raise ConfigError(
                "output_dir", folder, reason=f"the folder holds a {name}; choose another folder"
            )
    return folder


def _begun(config: Config, folder: Path) -> bool:
    """Whether it was this run that was stopped there, which is begun again."""
    try:
        before = load_config(folder / CONFIG_FILE)
    except ConfigError:
        return False
    return (before.onnx, before.mode) == (config.onnx, config.mode)


def _read(config: Config) -> FloatFile:
    """The file, once it and the settings are found to fit each other."""
    assert config.onnx is not None
    if config.backend.overrides:
        raise ConfigError("backend.overrides", ", ".join(config.backend.overrides), "{} with onnx=FILE")
    if config.verify.control:
        raise ConfigError("verify.control", True, "false: nothing is fine-tuned of an ONNX file")
    backend_of(config)
    file = read_float_file(Path(config.onnx), config.export.opset, _layout(config))
    batch, asked = file.shape[0], config.data.image_size
    if asked is not None and file.size(asked) != as_typed(asked):
        raise ConfigError("data.image_size", asked, f"null or {file.size(asked)}, the input of {config.onnx}")
    if batch not in (None, config.verify.latency_batch):
        if config.verify.latency_batch != VerifyConfig().latency_batch:
            allowed = f"{batch}, the fixed batch of {config.onnx}"
            raise ConfigError("verify.latency_batch", config.verify.latency_batch, allowed)
        config.verify.latency_batch = batch
    images = config.calibration.images
    if config.mode == "static" and batch is not None and batch > images:
        raise ConfigError("calibration.images", images, f"at least {batch}, the file's batch")
    if config.backend.reduce_range is True and config.mode in ("float16", "weight_only"):
        allowed = f"false with mode={config.mode}, which multiplies in float"
        raise ConfigError("backend.reduce_range", True, allowed)
    return file


def _layout(config: Config) -> str:
    """Axes of the file's input: as the command line says, or a bundle's model.json beside the file."""
    told = preprocessing_beside(Path(str(config.onnx))) or {}
    return config.data.layout or str(told.get("layout", "nchw")).lower()
