"""Quantizes a float ONNX file by ONNX Runtime's tools, without a `QATModule`; verifies and bundles the new file.

dynamic | static | float16 | weight_only → verify → report
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.export import ort_modes
from qatkit.graph.captured import Captured
from qatkit.jobs.hand_over import ended, hand_over
from qatkit.jobs.stages import Always, State
from qatkit.jobs.verify import SAMPLE_BATCH, conclude, planned_verification
from qatkit.records.detections import nms_file
from qatkit.records.plan import Planned
from qatkit.records.results import Results
from qatkit.records.run_files import CONFIG_FILE, FLOAT_FILE, MODEL_FILE, file_name, write_model_json
from qatkit.run.backend import backend_of
from qatkit.run.export import describe, has_nms, write_float_file, write_nms
from qatkit.run.folder import Run
from qatkit.run.pace import Pace
from qatkit.run.plan import stage
from qatkit.verify.checks.base import Subject
from qatkit_verify.errors import ConfigError, disk_error, one_line
from qatkit_verify.session import open_session, run_images

_LABELS = {
    "dynamic": "INT8 dynamic",
    "static": "INT8 static",
    "float16": "float16",
    "weight_only": "INT8 weights",
}
# Weights are dequantized once when the session opens, not in each run (figures: decision 15).
_WEIGHT_ONLY_OPTIONS = {"session.disable_quant_qdq": "1"}


_RANGE_SAMPLES = 16
Given = Sequence[int] | Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Made:
    """The description of a quantized file for its report.

    Attributes:
        mode: the mode that quantized the file.
        source: the name of the float model or file.
        shape: the shape of an input that the file accepts, [N, C, H, W], or a batch by the names of its
            inputs.
        left_float: the names or globs of operators that the mode leaves float on purpose.
        notes: notes for the report.
        without: the groups of the configuration that had no effect.
        beside: the names of further files that the report lists.
    """

    mode: str
    source: str
    shape: Given
    left_float: list[str]
    notes: list[str] = field(default_factory=list)
    without: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


class Left(NamedTuple):
    """The operators that a mode leaves float.

    Attributes:
        names: the names of the operators, or globs for them.
        notes: notes for the report on these operators.
    """

    names: list[str]
    notes: list[str]


class ByMode(Always):
    """Quantizes the float model by one of the modes of `qatkit.export.ort_modes`, without a simulation."""

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        run, first = state.run, state.run.seconds.get("export_first")
        about = f"the float file, and quantized: {run.config.export.mode}"
        written = stage("export", about, lambda: pace.known(first))
        return [written, *planned_verification(run.config, state.data, pace, ["float", "int8"])]

    def run(self, state: State) -> State:
        return replace(state, status=from_model(state.run, state.captured, state.data))


def from_model(run: Run, model: Captured, data: DataModule) -> int:
    """Exports a float model, quantizes the file by `config.export.mode`, which is not static, and calls `finish`.

    Returns 0, or 1 if the file misses a bound or its bundle cannot be published.

    Raises:
        ConfigError: the mode can't quantize this model.
    """
    mode = run.config.export.mode
    path, target = run.files / FLOAT_FILE, run.files / file_name(mode)
    batch = 1 if run.config.export.dynamic_batch else run.config.verify.latency_batch
    shape = data.inputs.timed(batch)
    batches = range_batches(data, batch) if mode == "float16" else ()
    with run.stage("export", f"exporting, quantizing: {mode}"):
        write_float_file(model, run.config, data.inputs, path)
        left = make(run.config, path, target, shape, batches)
        if suppresses := has_nms(run.config):
            write_nms(target, nms_file(target), run.config)
    notes = [*run.notes, *data.notes, *left.notes]
    beside = (nms_file(target).name,) if suppresses else ()
    made = Made(mode, run.config.model.name, shape, left.names, notes, ("calibration",), beside)
    return finish(run, data, made)


def range_batches(data: DataModule, batch: int) -> list[Any]:
    """Returns calibration samples in batches of `batch`, on which mode float16 measures the ranges of tensors."""
    return data.full_batches(max(_RANGE_SAMPLES, batch), batch)


def make(
    config: Config,
    source: Path,
    target: Path,
    shape: Given,
    batches: Iterable[Any] = (),
) -> Left:
    """Quantizes the float file `source` by the configuration's mode, writes it to `target`, and runs it once.

    Args:
        config: the configuration.
        source: the float file.
        target: the path of the quantized file.
        shape: the shape of an input that the file accepts, [N, C, H, W], or a batch by the names of its
            inputs.
        batches: the samples for the calibration in mode static, and for the ranges of tensors in mode
            float16.

    Returns:
        The operators that the mode leaves float.

    Raises:
        ConfigError: the mode can't quantize this file.
    """
    of_file = config.onnx is not None
    key, mode = ("mode", config.mode) if of_file else ("export.mode", config.export.mode)
    try:
        if mode == "dynamic":
            left = ort_modes.dynamic(source, target, reduce_range=config.backend.reduce_range)
        elif mode == "static":
            left = ort_modes.static(source, target, batches, backend_of(config))
        elif mode == "float16":
            left = ort_modes.float16(source, target, batches)
        else:
            left = ort_modes.weight_only(source, target)
        session = open_session(target, threads=config.verify.threads, options=_session_options(config, mode))
        run_images(session, shape if isinstance(shape, Mapping) else np.zeros(shape, np.float32))
    except Exception as error:  # the tools may raise any exception, and the user can only choose another mode
        of_images = isinstance(error, ConfigError) and error.key.startswith("data.")
        if of_images or disk_error(error) is not None:
            raise
        name = config.onnx if of_file else config.model.name
        reason = f"this mode cannot quantize {name} ({one_line(error)}); choose another mode"
        raise ConfigError(key, mode, reason=reason) from error
    in_float = mode not in ("dynamic", "static")
    return Left(["*"] if in_float else list(map(glob.escape, left.names)), left.notes)


def _session_options(config: Config, mode: str | None) -> Mapping[str, str]:
    return _WEIGHT_ONLY_OPTIONS if mode == "weight_only" else backend_of(config).session_options


def finish(run: Run, data: DataModule, made: Made) -> int:
    """Verifies, reports and, if requested, bundles the file; returns the exit status."""
    config, folder = run.config, run.folder
    write_model_json(folder, describe(data))
    subject = subject_of(config, run.files, made, data)
    subject = replace(
        subject,
        folder=folder,
        batches=lambda: data.test_subset_of(run.config.verify.images),
        labelled=data.labelled,
        sample=lambda images: data.test_subset(images, SAMPLE_BATCH),
        held_out=data.held_out_batches if data.held_out else None,
        states=data.states,
        sequences=data.sequences if data.states else None,
        sound=data.recordings.as_dict() if data.recordings is not None else None,
    )
    told = Results(
        config.name,
        made.source,
        str(folder),
        notes=made.notes,
        classes=data.classes,
        preprocessing=data.preprocessing.as_dict() if data.of_pictures else None,
        config={key: value for key, value in asdict(config).items() if key not in made.without},
    )
    name = file_name(made.mode)
    status = conclude(run, subject, told, [name, FLOAT_FILE, *made.beside, MODEL_FILE, CONFIG_FILE])
    return ended(run, hand_over(run, data, status, name))


def subject_of(config: Config, folder: Path, made: Made, data: DataModule) -> Subject:
    """Returns the files in `folder` as the subject of the checks, without images yet."""
    mode = made.mode
    return Subject(
        folder=folder,
        files={"float": folder / FLOAT_FILE, "int8": folder / file_name(mode)},
        batches=lambda: (),
        timed=data.inputs.timed,
        settings=config.verify,
        options=_session_options(config, mode),
        allow_float=made.left_float,
        other_runtime=backend_of(config).other_runtime if mode == "static" else "",
        file_shape=made.shape,
        label=_LABELS[mode],
        progress=config.trainer.progress,
        task=data.task,
    )
