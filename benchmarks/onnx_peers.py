"""Compares the INT8 files of qatkit and of other tools, on the same float files, samples, decisions and machine.

    uv run --with nncf==3.4.0 --with amd-quark==0.13 benchmarks/onnx_peers.py FILES [--pictures DIR]
        [--speech FILE.wav] [--data DIR] [--names a b] [--record]

Samples are those of `onnx_files.py`; every second one is for calibration, the others are for the comparison.

    qatkit   train.py recipe=onnx_ptq with default settings
    ort      onnxruntime.quantization: quant_pre_process, then quantize_static with default settings
    quark    AMD Quark's A8W8 preset
    nncf     nncf.quantize with default settings
    SQNR     of the worst output against the float file, in dB
    same     share of decisions equal to those of the float file (`verify.decision=auto`)
    speed    time of the float file over that of the INT8 file, batch 1, two threads, median of interleaved runs
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx_files import (
    ROOT,
    Array,
    arguments,
    parsed,
    quantize,
    ratios,
    read,
    run,
    samples_of,
)
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from qatkit.report import this_hardware
from qatkit.tasks.outputs import Outputs
from qatkit_verify.errors import one_line
from qatkit_verify.files import write_text
from qatkit_verify.latency import latency
from qatkit_verify.session import open_session

PAGE, RECORD = ROOT / "docs" / "onnx-peers.md", ROOT / "docs" / "onnx-peers.json"
Samples = Sequence[Mapping[str, Array]]


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """A calibration data reader over samples."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.rewind()

    def get_next(self) -> Mapping[str, Array] | None:
        return next(self._left, None)

    def rewind(self) -> None:
        self._left = iter(self._samples)


def ort(file: Path, samples: Samples, made: Path) -> None:
    """Quantizes with ONNX Runtime's tool."""
    prepared = made.with_suffix(".prepared.onnx")
    try:
        quant_pre_process(file, prepared)
    except Exception:  # its symbolic shape inference fails on some files
        shutil.copy(file, prepared)
    quantize_static(prepared, made, Reader(samples))


def quark(file: Path, samples: Samples, made: Path) -> None:
    """Quantizes with AMD Quark."""
    from quark.onnx import A8W8_QCONFIG, ModelQuantizer

    ModelQuantizer(copy.deepcopy(A8W8_QCONFIG)).quantize_model(str(file), str(made), Reader(samples))


def nncf(file: Path, samples: Samples, made: Path) -> None:
    """Quantizes with NNCF."""
    import nncf as tool

    onnx.save(tool.quantize(onnx.load(str(file)), tool.Dataset(list(samples))), str(made))


PEERS: dict[str, Callable[[Path, Samples, Path], None]] = {"ort": ort, "quark": quark, "nncf": nncf}


def compare(file: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Quantizes a file with each tool and returns its row."""
    data, kind = samples_of(file, args, folder)
    samples = list(read(data, file, 0))
    files, failed = {"float": file}, {}
    reason = quantize(file, data, folder / "run")
    if reason:
        failed["qatkit"] = reason
    else:
        files["qatkit"] = folder / "run" / "model.int8.onnx"
    for name, tool in PEERS.items():
        made = folder / f"{name}.onnx"
        try:
            # Some tools leave files in the working folder.
            with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(folder):
                tool(file, samples, made)
            open_session(made, threads=1).run(None, dict(samples[0]))
            files[name] = made
        except Exception as error:  # the row of a tool that fails is its error
            failed[name] = one_line(error)[:200]
    return {"file": file.stem, "data": kind, "failed": failed, "tools": _figures(files, data, samples[0])}


def _figures(files: Mapping[str, Path], data: Path, sample: Mapping[str, Array]) -> dict[str, Any]:
    sessions = {name: open_session(path, threads=2) for name, path in files.items()}
    given = list(read(data, files["float"], 1))
    exact = [sessions["float"].run(None, one) for one in given]
    names = [one.name for one in sessions["float"].get_outputs()]
    task = Outputs().suited(exact[0], names, 1)
    times = latency(files, dict(sample), threads=2, runs=50)
    found = {}
    for name in list(files)[1:]:
        outputs = [sessions[name].run(None, one) for one in given]
        agreement = task.agreement()
        for a, b in zip(exact, outputs, strict=True):
            agreement.add(task.joined(a), task.joined(b))
        sqnr = ratios(zip(exact, outputs, strict=True), len(names))
        found[name] = {
            "sqnr": min((one for one in sqnr if one is not None), default=None),
            "decision": task.names.decision,
            "same": agreement.share,
            "size": files[name].stat().st_size / files["float"].stat().st_size,
            "speed": [getattr(times[name], key) for key in ("ratio", "ratio_p10", "ratio_p90")],
        }
    return found


def page(rows: Sequence[Mapping[str, Any]], hardware: str) -> str:
    """Returns the table as Markdown."""
    lines = [
        "# Float ONNX files: comparison with other tools",
        "",
        "Written by `benchmarks/onnx_peers.py`, whose docstring explains the columns and the command; do not edit."
        f" {hardware}. A file without an SQNR is exact: nothing in it is quantized. Compare tools at equal speed.",
        "",
        "| file | data | decision | tool | SQNR, dB | same | size | speed [p10-p90] |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines += list(_lines(row))
    return "\n".join(lines) + "\n"


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    head = f"| {row['file']} | {row['data']} "
    for tool in ("qatkit", *PEERS):
        if tool in row["failed"]:
            yield f"{head}| | {tool} | failed: {row['failed'][tool].replace('|', '/')} | | | |"
        else:
            one = row["tools"][tool]
            ratio, low, high = one["speed"]
            sqnr = "-" if one["sqnr"] is None else f"{one['sqnr']:g}"
            yield (
                f"{head}| {one['decision']} | {tool} | {sqnr} | {100 * one['same']:.1f} % | {one['size']:.3f} |"
                f" {ratio:.2f} [{low:.2f}-{high:.2f}] |"
            )
        head = "| | "


def main() -> int:
    """Compares the tools on each file and prints one line for each; with --record it also writes the page."""
    warnings.simplefilter("ignore")
    args = parsed(arguments("Compares the INT8 files of qatkit and of other tools."))
    run(args, compare, RECORD, lambda rows: write_text(PAGE, page(rows, this_hardware(2).cpu)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
