"""The names of the files in a run's folder, and the content of model.json.

    config.yaml        the configuration, complete                    written first
    rescue.yaml        of a rescue: the requested configuration; config.yaml is then that of the chosen rung
    ladder.json        of a rescue: the results of the rungs, whose own folders are below rungs/
    float.ckpt         a checkpoint for each training stage           while it trains
    last.ckpt
    control.ckpt
    placement.json     of a measured placement: the differences from the backend's table, and the times
    NAME.0.partial ... the partial result of an algorithm, block by block, until last.ckpt contains it
    model.int8.onnx    the file to deploy; model.MODE.onnx if a mode was requested
    model.float.onnx   the float file, for comparison
    model.dynamic.onnx of verify.dynamic: ONNX Runtime's dynamic int8 version of the float file, for comparison
    model.json         preprocessing and classes, for deployment
    ranges.json        every quantized tensor's range
    tensorrt.table     the same in TensorRT's format, if requested
    sensitivity.json   of an analysis: what it has measured so far
    pictures/          its pictures as PNG files; in histograms/ one for each tensor
    report.html        the report for readers
    report.json        for programs; with it the run is complete, except for
    bundle             if one is requested and every bound is met

The module handles only names and JSON, and needs neither torch, onnx nor the configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qatkit.encryption.vault import readable
from qatkit_verify.files import write_text
from qatkit_verify.untrusted import read_json

CONFIG_FILE = "config.yaml"
PLACEMENT_FILE = "placement.json"
CLIMB_FILE, LADDER_FILE = "rescue.yaml", "ladder.json"
FLOAT_CHECKPOINT, CHECKPOINT_FILE, CONTROL_CHECKPOINT = "float.ckpt", "last.ckpt", "control.ckpt"
# One for each training stage, the last stage first.
STAGE_CHECKPOINTS = (CONTROL_CHECKPOINT, CHECKPOINT_FILE, FLOAT_CHECKPOINT)
# Partial results of a long algorithm.
PARTIAL = ".partial"
INT8_FILE, FLOAT_FILE = "model.int8.onnx", "model.float.onnx"
MODEL_FILE, RANGES_FILE, TABLE_FILE = "model.json", "ranges.json", "tensorrt.table"
REPORT_FILE, PAGE_FILE = "report.json", "report.html"
# For an analysis: the measurements of its longest part so far, and the folder of its pictures.
SENSITIVITY_FILE, PICTURES = "sensitivity.json", "pictures"
# Files for deployment in addition to the INT8 file, and a self-contained folder or archive.
BESIDE_INT8 = (FLOAT_FILE, MODEL_FILE, RANGES_FILE)
HANDED_OVER = (BUNDLE_FOLDER, BUNDLE_ZIP, SEALED_BUNDLE) = ("bundle", "bundle.zip", "bundle.zip.encrypted")

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


def file_name(mode: str | None) -> str:
    """Returns the name of the quantized file, by the requested mode if there is one."""
    return INT8_FILE if mode is None else f"model.{mode}.onnx"


def last_checkpoint(folder: Path) -> Path | None:
    """Returns the checkpoint of the last training stage that has begun; None if there is none."""
    return next((path for name in STAGE_CHECKPOINTS if (path := folder / name).is_file()), None)


def partial_results(folder: Path) -> list[Path]:
    """Returns the files with partial results of algorithms, the newest first; a run with last.ckpt has none."""
    return sorted(folder.glob(f"*{PARTIAL}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def report_of(folder: Path) -> dict[str, Any] | None:
    """Returns the report.json of a finished run; None if it is missing or cannot be read."""
    try:
        report = read_json(folder / REPORT_FILE)
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def changed_since_its_report(path: Path) -> bool:
    """Returns whether a file has changed since the report.json next to it; False if the report does not list it."""
    try:
        files = read_json(path.with_name(REPORT_FILE))["files"]
        told = next(entry["sha256"] for entry in files if entry["name"] == path.name)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return False
    with readable(path) as plain, plain.open("rb") as stream:
        return bool(hashlib.file_digest(stream, "sha256").hexdigest() != told)


def model_json(preprocessing: Mapping[str, object], classes: Sequence[str]) -> dict[str, Any]:
    """Returns the content of model.json: the preprocessing (`Preprocessing.as_dict`) and the names of the classes."""
    return {"preprocessing": dict(preprocessing), "classes": list(classes)}


def write_model_json(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes model.json into a run's folder.

    Args:
        folder: the folder.
        about: the result of `model_json`, possibly with more entries (integer inputs and outputs).
    """
    write_text(folder / MODEL_FILE, json.dumps(about, indent=2) + "\n")
