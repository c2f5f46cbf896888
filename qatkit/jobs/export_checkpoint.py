"""Exports a checkpoint as an ONNX file again: the same checkpoint gives the same bytes."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qatkit import report
from qatkit.choose.placement.measured import with_placement_of
from qatkit.config.compose import load_config
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.data.inputs import Inputs, inputs_of
from qatkit.encryption.vault import protected, readable, secret
from qatkit.export.accuracy_level import FLOAT, at_level
from qatkit.export.add_states import add_states
from qatkit.graph.selectors import names_in_file
from qatkit.jobs.accuracy_level import level_of_run
from qatkit.jobs.hand_over import bundle_line, bundled, check_hand_over, same_file, source_of
from qatkit.jobs.packed_weights import check_form
from qatkit.records.detections import nms_file
from qatkit.records.run_files import CONFIG_FILE, FLOAT_FILE, REPORT_FILE, file_name, write_model_json
from qatkit.run.build import captured, data_of, qat_module
from qatkit.run.build_model import float_model
from qatkit.run.export import check_integer_ends, check_weights, finish_file, has_nms, write_file, write_nms
from qatkit.run.find import output_dir
from qatkit.run.folder import read_checkpoint, say
from qatkit.run.lock import locked
from qatkit.run.memory import check_memory
from qatkit.train.module import QATModule
from qatkit.verify.audit import audit
from qatkit.verify.checks.audit import audit_line
from qatkit_verify.errors import ConfigError, as_typed, counted
from qatkit_verify.fitting import by_sides
from qatkit_verify.stream import stream_file


def export(config: Config) -> int:
    """Writes the ONNX file of `config.checkpoint` again; the same checkpoint gives the same bytes.

    Returns 0, or 1 if the audit finds a problem and `verify.audit` is true.

    Raises:
        ConfigError: settings do not fit the checkpoint or the run in its folder; nothing is written.
    """
    with protected(config.export.encrypt):
        return _exported(config)


def _exported(config: Config) -> int:
    assert config.checkpoint is not None
    folder, run = output_dir(config), Path(config.checkpoint).parent
    _check_settings(config, folder, run)
    stored = read_checkpoint(config.checkpoint)
    placed = with_placement_of(config, stored["qatkit"])
    module = restored(placed, config.checkpoint, stored)
    inputs = inputs_of(stored["qatkit"])
    if not config.export.dynamic_batch:
        batch = config.verify.latency_batch
        check_memory("verify.latency_batch", batch, inputs.bytes, inputs, "the inputs")
    integer = config.export.io == "uint8"
    if integer:
        check_integer_ends(module)
    data = _opened(config, inputs)
    if data is not None and config.export.bundle:
        _check_moved(config, run, data, stored)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(config.mode)
    say(f"exporting {path}")
    with locked(folder), secret(path) as new:
        write_file(module.convert().graph, placed, inputs, new)
        if not config.export.decoder and (level := level_of_run(run)) != FLOAT:
            at_level(new, new, level)
        about = finish_file(new, config, data) if integer and data is not None else None
    if about is not None:
        write_model_json(folder, about)
    if has_nms(config):
        with readable(path) as plain, secret(nms_file(path)) as new:
            write_nms(plain, new, config)
    if config.export.stream:
        with readable(path) as plain, secret(stream_file(path)) as new:
            add_states(plain, new)
    with readable(path) as plain:
        found = audit(plain, options=module.backend.session_options, threads=config.verify.threads,
                      allow_float=list(map(glob.escape, names_in_file(module.graph, dict(module.skipped)))),
                      input_shape=inputs.timed(config.verify.latency_batch),
                      other_runtime=module.backend.other_runtime)  # fmt: skip
    record = report.file_records(folder, [path.name])[0]
    say(audit_line(found))
    for problem in found.problems:
        say(f"  problem: {problem}")
    say(f"{path}  {record.bytes / 1e6:.2f} MB  sha256 {record.sha256}")
    if data is not None and config.export.bundle:
        _bundle(config, path, data)
    return 0 if found.ok or not config.verify.audit else 1


def _opened(config: Config, inputs: Inputs) -> DataModule | None:
    """Returns the run's data if integer inputs and outputs or a bundle need them, else None."""
    integer = config.export.io == "uint8"
    if not integer and not config.export.bundle:
        return None
    data = data_of(config)
    if integer and data.inputs.shape != inputs.shape:
        channels, size = inputs.shape[0], by_sides(inputs.shape[1:])
        reason = (
            f"the data settings give images {list(data.inputs.shape)}, but the checkpoint was trained on images of"
            f" {counted(channels, 'channel')} and {size} pixels; use the data settings of its run"
        )
        raise ConfigError("data.image_size", config.data.image_size, reason=reason)
    return data


def _check_moved(config: Config, run: Path, data: DataModule, stored: Mapping[str, Any]) -> None:
    """Rejects other data than the run's in a bundle, whose labels and golden answers come from them."""
    root, told = config.data.root, stored.get("DataModule", {}).get("fingerprint", data.fingerprint)
    if root != load_config(run / CONFIG_FILE).data.root and told != data.fingerprint:
        raise ConfigError("data.root", root, f"the data of the run in {run}; those in this folder differ")


def _bundle(config: Config, path: Path, data: DataModule) -> None:
    """Writes a bundle of the exported file and of the run to which the checkpoint belongs, next to the file."""
    run = Path(str(config.checkpoint)).parent
    if config.export.demo and not (run / FLOAT_FILE).is_file():
        say(f"note: {run} has no {FLOAT_FILE}, so the demo page has no comparison with float")
    with readable(path) as plain:
        for beside in (nms_file, stream_file):
            if plain != path and beside(path).is_file():
                with readable(beside(path)) as other:
                    shutil.copyfile(other, beside(plain))
        say(bundle_line(bundled(source_of(config, run, plain, data), path.parent)))


def _check_settings(config: Config, folder: Path, run: Path) -> None:
    """Raises ConfigError for settings that the export of this checkpoint, or of any checkpoint, does not support."""
    if config.export.mode != "static":
        allowed = "static, since a checkpoint is exported as QDQ (use onnx=model.float.onnx mode=MODE for other modes)"
        raise ConfigError("export.mode", config.export.mode, allowed)
    _check_neighbours(config, folder)
    check_hand_over(config)
    check_weights(config)
    check_form(config)
    if config.export.bundle and not (run / REPORT_FILE).is_file():
        allowed = f"false, since the run in {run} has not finished (there is no {REPORT_FILE})"
        raise ConfigError("export.bundle", True, allowed)


def restored(config: Config, checkpoint: str, stored: dict[str, Any]) -> QATModule:
    """Returns the module of a checkpoint, rebuilt with the placement in `config` and the choices in `stored`."""
    blank = replace(config.model, weights=None, checkpoint=None, num_classes=stored["qatkit"]["num_classes"])
    inputs = inputs_of(stored["qatkit"])
    module = qat_module(
        config,
        captured(config, float_model(config, blank), inputs),
        inputs,
        QATModule,
        algorithms=stored["qatkit"].get("algorithms"),
        floats=stored["qatkit"].get("floats", ()),
    )
    try:
        module.load_state_dict(stored["state_dict"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            "checkpoint", checkpoint, reason=f"the checkpoint does not fit its config.yaml ({reason})"
        ) from error
    module.take_average(stored.get("average"))  # separate from the weights until a training has finished
    module.ready_to_convert()  # the scales in a checkpoint of an unfinished training are not aligned yet
    return module


def _check_neighbours(config: Config, folder: Path) -> None:
    """Rejects an export with other settings into the folder of a finished run, whose report describes the old file."""
    if not (folder / REPORT_FILE).exists() or not (folder / CONFIG_FILE).is_file():
        return
    for name, value in same_file(config.export, load_config(folder / CONFIG_FILE).export).items():
        allowed = f"{as_typed(value)} in {folder}, whose report describes such a file, or another output_dir"
        raise ConfigError(f"export.{name}", getattr(config.export, name), allowed)
