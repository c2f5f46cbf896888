"""Quantizes a folder of float ONNX files without training, with `train.py recipe=onnx_ptq`, and prints their figures.

    uv run benchmarks/onnx_files.py FILES [--pictures DIR] [--speech FILE.wav] [--data DIR] [--names a b] [--record]

The samples of a file come from the first of these that applies: the arrays in DIR/STEM (`data=arrays`); pictures, for
inputs with three channels; excerpts of speech, for audio inputs; otherwise random values: floats from a standard normal
distribution, integers from 0 to 9, booleans all true. Dynamic axes get the sizes of `_OPEN`. Inputs called `sr` are
fixed to 16000.

    int8     share of multiply-accumulates that ONNX Runtime computes in int8
    SQNR     of each output of the INT8 file against the given file, in dB, on the verification samples
    same     share of equal decisions (`verify.decision=auto`)
    size     size of the INT8 file over that of the given file
    speed    time of the given file over that of the INT8 file, batch 1, two threads, median of interleaved runs
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qatkit.config.schema import ModelConfig
from qatkit.data.arrays import Port
from qatkit.models import declared
from qatkit.report import this_hardware
from qatkit_verify.files import write_text
from qatkit_verify.session import open_session

ROOT = Path(__file__).parent.parent
PAGE, RECORD = ROOT / "docs" / "onnx-files.md", ROOT / "docs" / "onnx-files.json"
_SAMPLES = 32
_SOUND = 256  # an input with a last axis of at least this size is taken for audio
_OPEN = {2: (4, 1000), 3: (4, 40, 64), 4: (4, 3, 96, 192)}  # sizes of dynamic axes, by rank
_LIMIT = 900  # time limit of one file, in seconds
_PLACE = re.compile(r"; /[^)]*| at /[^`]*`[^`]*`")  # matches the place of a line of code in an error message

Array = NDArray[Any]


class Samples:
    """Samples for the inputs of a file, each with a batch axis.

    Attributes:
        kind: the source of the values, known after an iteration: "pictures", "speech" or "drawn".
    """

    def __init__(self, wanted: Sequence[Port], pictures: Sequence[Path], speech: Array | None) -> None:
        self._wanted, self._pictures, self._speech = wanted, pictures, speech
        self._draw = np.random.default_rng(0)
        self.kind = "drawn"

    def __iter__(self) -> Iterator[dict[str, Array]]:
        shared = {one.name: self._value(one, 0) for one in self._wanted if one.axis is None}
        batched = any(one.axis is not None for one in self._wanted)
        for number in range(_SAMPLES):
            drawn = {one.name: self._value(one, number) for one in self._wanted}
            yield {**drawn, **shared} if batched else drawn

    def _value(self, port: Port, number: int) -> Array:
        sizes = _OPEN.get(len(port.shape), (4,) * len(port.shape))
        shape = [known or size for known, size in zip(port.shape, sizes, strict=True)]
        if port.axis is not None:
            shape[port.axis] = 1
        dtype = np.dtype(port.dtype)
        if dtype.kind != "f":
            whole: Array = self._draw.integers(0, 10, shape).astype(dtype)
            return np.ones(shape, dtype) if dtype.kind == "b" else whole
        if self._pictures and len(shape) == 4 and 3 in (shape[1], shape[3]):
            self.kind = "pictures"
            return self._picture(shape, number)
        if self._speech is not None and len(shape) in (2, 3) and shape[-1] >= _SOUND:
            self.kind = "speech"
            starts = self._draw.integers(0, len(self._speech) - shape[-1], math.prod(shape[:-1]))
            return np.stack([self._speech[at : at + shape[-1]] for at in starts]).reshape(shape)
        drawn: Array = self._draw.standard_normal(shape).astype(dtype)
        return drawn

    def _picture(self, shape: Sequence[int], number: int) -> Array:
        first = shape[1] == 3
        height, width = shape[2:] if first else shape[1:3]
        with Image.open(self._pictures[number % len(self._pictures)]) as picture:
            pixels = np.asarray(picture.convert("RGB").resize((width, height)), np.float32) / 127.5 - 1
        return pixels.transpose(2, 0, 1)[None] if first else pixels[None]


def samples_of(file: Path, given: argparse.Namespace, folder: Path) -> tuple[Path, str]:
    """Returns the folder and kind of a file's samples: its own below --data, or new ones in `folder`."""
    own = given.data and given.data / file.stem
    if own and own.is_dir():
        return own, "own"
    data = folder / "data"
    data.mkdir()
    samples = Samples(declared(_config(file), None).ports, given.found, given.sound)
    for number, sample in enumerate(samples):
        np.savez(data / f"{number:03}.npz", **sample)  # type: ignore[arg-type]
    return data, samples.kind


def fixed_inputs(file: Path) -> dict[str, int]:
    """Returns the values of the inputs that are the same for all samples, by name."""
    return {one.name: 16000 for one in open_session(file, threads=1).get_inputs() if one.name == "sr"}


def _config(file: Path) -> ModelConfig:
    fixed = fixed_inputs(file)
    return ModelConfig(name=f"onnx/{file}", kwargs={"fix": fixed} if fixed else {})


def quantize(file: Path, data: Path, run: Path, *settings: str) -> str:
    """Quantizes a file in its own process.

    Args:
        file: the float file.
        data: the folder of samples, in the format of `data=arrays`.
        run: the folder of the run.
        settings: further overrides.

    Returns:
        The reason why there is no INT8 file; "" if there is one.
    """
    command = [sys.executable, "train.py", "recipe=onnx_ptq", f"onnx='{file}'", f"data.root='{data}'",
               "trainer.progress=false", "verify.audit=false", "verify.min_float_agreement=0",
               "verify.min_float_sqnr=-100", "data.workers=0", f"output_dir={run}",
               *(["+model.kwargs={fix:{sr:16000}}"] if fixed_inputs(file) else ()), *settings]  # fmt: skip
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return f"not finished after {_LIMIT} s"
    if (run / "report.json").is_file():
        return ""
    told = done.stderr.strip().splitlines()[-1].removeprefix("error: ").replace(str(file), file.name)
    return _PLACE.sub("", told)


def row_of(file: Path, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Quantizes a file and returns its row."""
    data, kind = samples_of(file, given, folder)
    began = time.monotonic()
    refused = quantize(file, data, folder / "run")
    row = {"file": file.stem, "data": kind, "seconds": round(time.monotonic() - began)}
    if refused:
        return row | {"refused": refused}
    return row | _figures(folder / "run", data, json.loads((folder / "run" / "report.json").read_text()))


def _figures(run: Path, data: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    exact, found = (open_session(run / f"model.{name}.onnx", threads=2) for name in ("float", "int8"))
    pairs = ((exact.run(None, one), found.run(None, one)) for one in read(data, run / "model.float.onnx", 1))
    sqnr = ratios(pairs, len(exact.get_outputs()))
    fidelity = report["fidelity"]["int8"]
    sizes = {one["name"]: one["bytes"] for one in report["files"]}
    return {
        "outputs": {one.name: value for one, value in zip(exact.get_outputs(), sqnr, strict=True)},
        "decision": report["task"]["decision"],
        "same": fidelity["agreement"],
        "int8": report["audit"]["int8_macs"] / max(1, report["audit"]["macs"]),
        "size": sizes["model.int8.onnx"] / sizes["model.float.onnx"],
        "speed": [report["latency"]["int8"][key] for key in ("ratio", "ratio_p10", "ratio_p90")],
    }


def read(data: Path, file: Path, first: int) -> Iterator[dict[str, Array]]:
    """Yields every second sample as inputs by name, from `first`: 0 for calibration, 1 for verification."""
    fixed = {name: np.asarray(value) for name, value in fixed_inputs(file).items()}
    names = [one.name for one in open_session(file, threads=1).get_inputs()]
    for path in sorted(data.glob("**/*.np[yz]"))[first::2]:
        loaded = np.load(path)
        yield {name: fixed[name] if name in fixed else loaded[name] for name in names}


def ratios(pairs: Iterable[tuple[Sequence[Array], Sequence[Array]]], outputs: int) -> list[float | None]:
    """Returns the signal-to-noise ratio of each output over all samples, in dB.

    It is None for an output that is not float, differs in shape, is exact or is zero.

    Args:
        pairs: for each sample, the outputs of the reference file and of the other file.
        outputs: the number of outputs.
    """
    signal, noise = np.zeros(outputs), np.zeros(outputs)
    for exact, found in pairs:
        for place, (a, b) in enumerate(zip(exact, found, strict=True)):
            if np.asarray(a).dtype.kind == "f" and a.shape == b.shape:
                signal[place] += float(np.square(a, dtype=np.float64).sum())
                noise[place] += float(np.square(np.subtract(a, b, dtype=np.float64)).sum())
    return [round(10 * math.log10(s / n), 1) if s and n else None for s, n in zip(signal, noise, strict=True)]


def page(rows: Sequence[Mapping[str, Any]], hardware: str) -> str:
    """Returns the table as Markdown."""
    made = [row for row in rows if "refused" not in row]
    lines = [
        "# Float ONNX files",
        "",
        "Written by `uv run benchmarks/onnx_files.py`, whose docstring explains the columns; do not edit."
        " `train.py recipe=onnx_ptq` quantizes each file without training, with"
        f" {_SAMPLES // 2} samples for calibration and {_SAMPLES // 2} for verification. {hardware}."
        " A wide speed interval means that the machine was busy.",
        "",
        f"An INT8 file was written and run for {len(made)} of {len(rows)} files.",
        "",
        "| file | data | int8 | SQNR of each output, dB | decision | same | size | speed [p10-p90] | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "refused" in row:
            lines.append(
                f"| {row['file']} | {row['data']} | refused: {row['refused']} | | | | | | {row['seconds']} |"
            )
            continue
        outputs = ", ".join("-" if value is None else f"{value:g}" for value in row["outputs"].values())
        ratio, low, high = row["speed"]
        lines.append(
            f"| {row['file']} | {row['data']} | {100 * row['int8']:.0f} % | {outputs} | {row['decision']} |"
            f" {100 * row['same']:.1f} % | {row['size']:.3f} | {ratio:.2f} [{low:.2f}-{high:.2f}] | {row['seconds']} |"
        )
    return "\n".join(lines) + "\n"


def arguments(about: str) -> argparse.ArgumentParser:
    """Returns a parser with the options for files and samples."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("files", type=Path, help="folder of ONNX files")
    parser.add_argument("--pictures", type=Path, help="folder of pictures")
    parser.add_argument("--speech", type=Path, help="WAV file at 16 kHz")
    parser.add_argument("--data", type=Path, help="folder with one folder of arrays per file")
    parser.add_argument("--names", nargs="+", help="files to quantize, without .onnx (default: all)")
    parser.add_argument("--record", action="store_true", help="store the rows and write the page in docs")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the arguments, plus `found` (paths of up to `_SAMPLES` pictures) and `sound` (the speech, or None)."""
    args = parser.parse_args()
    args.found = sorted(args.pictures.iterdir())[:_SAMPLES] if args.pictures else []
    args.sound = None
    if args.speech:
        from scipy.io import wavfile

        args.sound = np.asarray(wavfile.read(args.speech)[1], np.float32) / 2**15
    return args


def chosen(args: argparse.Namespace) -> Iterator[Path]:
    """Yields the chosen files, smallest first."""
    for file in sorted(args.files.glob("*.onnx"), key=lambda path: path.stat().st_size):
        if not args.names or file.stem in args.names:
            yield file.resolve()


def run(
    args: argparse.Namespace,
    made: Callable[[Path, argparse.Namespace, Path], dict[str, Any]],
    record: Path,
    publish: Callable[[Sequence[Mapping[str, Any]]], None],
) -> None:
    """Prints one row per file.

    Args:
        args: the command-line arguments.
        made: returns the row of a file; it gets a temporary folder.
        record: the JSON file in which --record stores the rows, together with those of earlier runs.
        publish: called with all stored rows after each file, with --record.
    """
    known = {row["file"]: row for row in json.loads(record.read_text())} if record.is_file() else {}
    for file in chosen(args):
        with tempfile.TemporaryDirectory() as folder:
            known[file.stem] = row = made(file, args, Path(folder))
        print(json.dumps(row), flush=True)
        if args.record:
            rows = [known[name] for name in sorted(known)]
            write_text(record, json.dumps(rows, indent=1) + "\n")
            publish(rows)


def main() -> int:
    """Quantizes the files and prints one line for each; with --record it also writes the page."""
    args = parsed(arguments("Quantizes float ONNX files without training."))
    run(args, row_of, RECORD, lambda rows: write_text(PAGE, page(rows, this_hardware(2).cpu)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
