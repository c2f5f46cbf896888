"""Writes a bundle (format: `qatkit_verify.bundle`): the files of a finished run, golden vectors and a manifest.

    run's folder ── copies ──┐
    INT8 file, test samples ─┴─> .bundle.PROCESS.RANDOM.part ── manifest, signature ──> bundle/ or bundle.zip

The bundle is filled under a temporary name and gets its final name when it is complete. The same checkpoint gives
the same bytes: the measurements come from the run's own report and are not repeated.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qatkit.config.schema import ExportConfig
from qatkit.config.schema.model import TEXTS
from qatkit.data import DataModule
from qatkit.data.tokenizer import save_tokenizer
from qatkit.encryption.vault import readable
from qatkit.handover.card import card
from qatkit.handover.demo import write_demo
from qatkit.handover.demo.runtime import find_runtime
from qatkit.handover.golden import golden_of, ports_of
from qatkit.handover.javascript import write_javascript
from qatkit.handover.stream_section import stream_section
from qatkit.records.decoder_files import DECODER_FOLDER
from qatkit.records.detections import nms_file
from qatkit.records.run_files import (
    BUNDLE_FOLDER,
    BUNDLE_ZIP,
    CONFIG_FILE,
    FLOAT_FILE,
    PAGE_FILE,
    PLACEMENT_FILE,
    RANGES_FILE,
    REPORT_FILE,
    TABLE_FILE,
    changed_since_its_report,
)
from qatkit.report.page import for_bundle
from qatkit.report.run_code import Loading, arrays_program, as_markdown, sound_program
from qatkit.verify.checks.exact import LEVEL
from qatkit_verify.bundle.archive import write_zip
from qatkit_verify.bundle.golden import write_golden
from qatkit_verify.bundle.manifest import (
    ARRAYS_FILE,
    CARD_FILE,
    FORMAT,
    FORMAT_OF_ARRAYS,
    GOLDEN_FILE,
    INT8_FILE,
    LABELS_FILE,
    PREPROCESS_FILE,
    Manifest,
    entry,
    sha256,
    write_manifest,
)
from qatkit_verify.bundle.manifest import FLOAT_FILE as BUNDLED_FLOAT
from qatkit_verify.bundle.signature import private_key, public_of, sign
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import clear_parts, unfinished
from qatkit_verify.fitting import sides
from qatkit_verify.installed import OLDEST, TWO_BITS, ZERO_POINTS_OF_CHANNELS, version_numbers
from qatkit_verify.integer_ends import IntegerIO
from qatkit_verify.onnx_file import OnnxFile, read_onnx
from qatkit_verify.session import RUNTIME_VERSION, integer_io, open_session
from qatkit_verify.stream import stream_file
from qatkit_verify.untrusted import read_json

# The oldest versions of ONNX Runtime with kernels that earlier ones lack: QuantizeLinear of opset 23, and
# ConvInteger with int8 weights.
_OLDEST_OF_OPSET, _OLDEST_OF_OPERATOR = {23: "1.24"}, {"ConvInteger": "1.24"}
_CACHE = "calibration.safetensors"
# Files of a run's folder that are useful for deployment and keep their names in a bundle.
_OTHERWISE = "repeat the run, or set export.bundle=false"  # advice for a run that does not fit its report
_COPIED = (REPORT_FILE, PAGE_FILE, CONFIG_FILE, PLACEMENT_FILE, RANGES_FILE, TABLE_FILE)


@dataclass(frozen=True)
class BundleSource:
    """The sources of a bundle.

    Attributes:
        name: the name of the run.
        int8: the quantized file to deliver.
        run: the folder of a finished run, with report.json.
        data: the data whose test samples become golden vectors.
        export: the settings of the bundle.
        threads, options: the settings of ONNX Runtime, with all config entries with which the figures were
            measured.
        cache: the calibration cache of the run, if it has one.
    """

    name: str
    int8: Path
    run: Path
    data: DataModule
    export: ExportConfig
    threads: int
    options: Mapping[str, str]
    cache: Path | None = None


def check_source(run: Path, int8: Path) -> None:
    """Checks that the run of a bundle has a report that describes its files.

    Raises:
        ConfigError: there is no report, or a file is not the one that the report describes.
    """
    if not (run / REPORT_FILE).is_file():
        raise ConfigError(
            "export.bundle",
            True,
            reason=f"a bundle needs a finished run, but {run} has no {REPORT_FILE}; {_OTHERWISE}",
        )
    told = {one["name"]: one["sha256"] for one in read_json(run / REPORT_FILE)["files"]}
    if entry(int8.parent, int8.name).sha256 not in told.values():
        reason = f"{int8.name} is not the file that {run / REPORT_FILE} describes"
        fix = "export with the settings and versions of the run"
        raise ConfigError("export.bundle", True, reason=f"{reason}; {fix}")
    for name in (FLOAT_FILE, CONFIG_FILE):
        if (run / name).is_file() and changed_since_its_report(run / name):
            raise ConfigError(
                "export.bundle", True, reason=f"{run / name} has changed since the run wrote it; {_OTHERWISE}"
            )
    for beside in (nms_file(int8), stream_file(int8)):
        if beside.is_file() and beside.name in told and _digest(beside) != told[beside.name]:
            reason = f"{beside} has changed since {run / REPORT_FILE} was written; {_OTHERWISE}"
            raise ConfigError("export.bundle", True, reason=reason)


def _digest(path: Path) -> str:
    with readable(path) as plain:
        return sha256(plain)


def write_bundle(source: BundleSource, folder: Path) -> Path:
    """Writes `folder`/bundle or bundle.zip under a temporary name, then renames it; an existing one is replaced.

    Raises:
        ConfigError: for the reasons of `check_source`, `golden_of` and `find_runtime`, or if `export.sign` names no
            usable key.
    """
    check_source(source.run, source.int8)
    clear_parts(folder)
    signer = private_key(source.export.sign) if source.export.sign else None
    target = folder / (BUNDLE_ZIP if source.export.bundle_as == "zip" else BUNDLE_FOLDER)
    new = unfinished(folder / BUNDLE_FOLDER)
    new.mkdir()
    try:
        _fill(source, new)
        write_manifest(new, _manifest(source, new, public_of(signer) if signer else None))
        if signer:
            sign(new, signer)
        if target.name == BUNDLE_ZIP:
            write_zip(new, target)
        else:
            _replace(new, target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return target


def _replace(new: Path, target: Path) -> None:
    """Replaces a folder. The old one is renamed first, since a folder cannot be renamed to one that is not empty."""
    if target.exists():
        old = unfinished(target)
        os.replace(target, old)
        os.replace(new, target)
        shutil.rmtree(old)
    else:
        os.replace(new, target)


def _fill(source: BundleSource, new: Path) -> None:
    """Writes every file of the bundle except the manifest and its signature."""
    report = read_json(source.run / REPORT_FILE)
    shutil.copyfile(source.int8, new / INT8_FILE)
    if source.export.bundle_float and (source.run / FLOAT_FILE).is_file():
        _copied(source.run / FLOAT_FILE, new / BUNDLED_FLOAT)
    for name in _COPIED:
        if (source.run / name).is_file():
            shutil.copyfile(source.run / name, new / name)
    _copy_larger_files(source, new)
    if source.cache is not None and source.cache.is_file():
        _copied(source.cache, new / _CACHE)
    step = (report.get("parity") or {}).get("step")
    golden = golden_of(source.int8, source.data, source.export.golden_images, step,
                       threads=source.threads, options=source.options)  # fmt: skip
    write_golden(new / GOLDEN_FILE, golden)
    if source.data.of_arrays:
        name, told = ARRAYS_FILE, arrays_json(source.int8, source.data, source.threads)
    elif source.data.recordings is not None:
        prepared, shape = source.data.recordings.as_dict(), source.data.recordings.shape
        name, told = (
            PREPROCESS_FILE,
            {"format": 1, **prepared, **ends_json(source.int8, shape, source.threads)},
        )
    else:
        prepared = source.data.preprocessing.as_dict()
        name, told = PREPROCESS_FILE, preprocess_json(source.int8, prepared, source.threads)
        if source.data.task.boxes:
            told["task"] = source.data.task.names.name
    (new / name).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if source.data.config.source in TEXTS:
        save_tokenizer(source.data.config, source.data.request.about, new)
    if source.data.classes:
        (new / LABELS_FILE).write_text(_lines(source.data.classes), encoding="utf-8")
    _fill_for_programs(source, new, report)


def _copy_larger_files(source: BundleSource, new: Path) -> None:
    """Copies the additional files of some tasks: a decoder, a file with non-maximum suppression, a file for chunks."""
    for beside in (nms_file, stream_file):
        if beside(source.int8).is_file():
            _copied(beside(source.int8), new / beside(Path(INT8_FILE)).name)
    if source.export.decoder and (source.run / DECODER_FOLDER).is_dir():
        shutil.copytree(source.run / DECODER_FOLDER, new / DECODER_FOLDER)


def _fill_for_programs(source: BundleSource, new: Path, report: Mapping[str, Any]) -> None:
    """Writes the files that show how to run the model.

    These are the model card, JavaScript modules (for images and recordings) and, if it is requested, the demo page (for
    images). In the report's HTML page (for images), the code that loads the file is adapted to the bundle.
    """
    if source.data.of_arrays:
        _write_card(source, new, report, arrays_program(new, source.options), read_json(new / ARRAYS_FILE))
        return
    if source.data.recordings is not None:
        _write_card(source, new, report, sound_program(new, source.options), read_json(new / PREPROCESS_FILE))
        write_javascript(new)
        return
    loading = Loading.of_bundle(new, source.options)
    _write_card(source, new, report, as_markdown(loading))
    if (new / PAGE_FILE).is_file():
        page = (new / PAGE_FILE).read_text(encoding="utf-8")
        (new / PAGE_FILE).write_text(for_bundle(page, loading), encoding="utf-8")
    write_javascript(new)
    if source.export.demo:
        write_demo(new, find_runtime(source.export.demo_runtime), source.name, source.options)


def _write_card(
    source: BundleSource,
    new: Path,
    report: Mapping[str, Any],
    snippets: str,
    told: Mapping[str, Any] | None = None,
) -> None:
    inputs = open_session(new / INT8_FILE, threads=source.threads).get_inputs()
    text = card(report, source.data.classes, snippets, told, stream_section(new, told or {}),
                _requires(read_onnx(new / INT8_FILE)), {one.name: one.shape for one in inputs})  # fmt: skip
    (new / CARD_FILE).write_text(text, encoding="utf-8")


def _copied(path: Path, target: Path) -> None:
    """Copies a file, decrypted if necessary: a bundle's files are not encrypted one by one, as a run's are."""
    with readable(path) as plain:
        shutil.copyfile(plain, target)


def _lines(labels: Iterable[str]) -> str:
    return "".join(" ".join(label.split()) + "\n" for label in labels)


def preprocess_json(int8: Path, preprocessing: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Returns the content of preprocess.json: the preprocessing of images, and the file's input and output."""
    channels = int(preprocessing["channels"])
    order, layout = preprocessing.get("channel_order", "RGB"), preprocessing.get("layout", "NCHW")
    size = sides(preprocessing["image_size"])
    image = (*size, channels) if layout == "NHWC" else (channels, *size)
    return {
        "format": 1,
        **preprocessing,
        "antialias": True,
        "crop": "center" if preprocessing.get("fit", "crop") == "crop" else "none",
        "channel_order": {1: "L", 3: order}.get(channels, str(channels)),
        "layout": layout,
        **ends_json(int8, image, threads),
    }


def ends_json(int8: Path, sample: Iterable[int], threads: int) -> dict[str, Any]:
    """Returns the entries of preprocess.json on the file's input and output; `sample` is the shape of a sample."""
    session = open_session(int8, threads=threads)
    ends = integer_io(session)
    (taken, *_), (given, *_) = session.get_inputs(), session.get_outputs()
    return {
        "input": {
            "name": taken.name,
            "dtype": "uint8" if ends else "float32",
            "shape": [*_shape(taken.shape[:1]), *sample],  # even if the file accepts other sizes
        },
        "output": {"name": given.name, "shape": _shape(given.shape), **_meaning(ends)},
    }


def arrays_json(int8: Path, data: DataModule, threads: int) -> dict[str, Any]:
    """Returns the content of model.json, for a file whose inputs are arrays: its inputs and outputs."""
    taken, given = ports_of(open_session(int8, threads=threads), data)
    return {
        "format": 1,
        "inputs": [one.as_dict() for one in taken],
        "outputs": [one.as_dict() for one in given],
    }


def _shape(shape: Iterable[Any]) -> list[int | str]:
    return [size if isinstance(size, int) else "N" for size in shape]


def _meaning(ends: IntegerIO | None) -> dict[str, Any]:
    if ends is None:
        return {"dtype": "float32"}
    return {"dtype": ends.dtype, "scale": ends.scale, "zero_point": ends.zero_point}


def oldest_runtime(file: OnnxFile) -> str:
    """Returns the oldest version of ONNX Runtime that runs a file."""
    of_opset = [one for opset, one in _OLDEST_OF_OPSET.items() if file.opsets.get("", 0) >= opset]
    of_operators = [_OLDEST_OF_OPERATOR.get(node.op_type, OLDEST) for node in file.nodes]
    of_weights = [ZERO_POINTS_OF_CHANNELS] if _has_several_zero_points(file) else []
    if any(node.op_type == "MatMulNBits" and node.ints.get("bits") == 2 for node in file.nodes):
        of_weights.append(TWO_BITS)
    return max([OLDEST, *of_opset, *of_operators, *of_weights], key=version_numbers)


def _has_several_zero_points(file: OnnxFile) -> bool:
    """Returns whether the output channels of a convolution have different zero points."""
    zeros = {node.outputs[0]: node.inputs[2] for node in file.nodes if len(node.inputs) > 2}
    found = [zeros.get(node.inputs[1], "") for node in file.nodes if node.op_type == "Conv"]
    return any(name in file.graph.tensors and not file.graph.tensors[name].uniform for name in found)


def _requires(file: OnnxFile) -> dict[str, Any]:
    """Returns what a runtime must support to run the file, for the manifest and the card."""
    opset = file.opsets.get("", 0)
    return {"onnxruntime": oldest_runtime(file), "opset": opset, "ir_version": file.ir_version}


def _manifest(source: BundleSource, new: Path, signer: str | None) -> Manifest:
    file = read_onnx(new / INT8_FILE)
    files = tuple(
        entry(new, path.relative_to(new).as_posix()) for path in sorted(new.rglob("*")) if path.is_file()
    )
    requires = _requires(file)
    report = read_json(new / REPORT_FILE)
    kind = FORMAT_OF_ARRAYS if source.data.of_arrays else FORMAT
    return Manifest(
        source.name,
        report["versions"],
        requires,
        files,
        signer,
        RUNTIME_VERSION,
        source.options,
        kind,
        source.data.splits.drawn,
        (report.get("measured") or {}).get(LEVEL),
    )
