"""Compares files for NPUs (`backend=npu_cnn`) with AMD Quark's XINT8: same float file, calibration and test images.

    uv run benchmarks/npu_placement.py recipe=mobilenet_v2_cifar10_ptq data.root=DIR model.checkpoint=FILE
        [--kinds none moment_rounding] [--peer PYTHON] [--preset PRESET] [--cle] [--images 2000] [--calibration 256]
        [--files FILE ...]

Arguments before the options are those of train.py, in addition to `backend=npu_cnn calibration=mse`. PYTHON is an
interpreter with Quark 0.13, which runs `quark_xint8.py`. Files of both tools have int8 biases with their own scales.
Kinds are lists of algorithms, joined by +. Each FILE, such as `model.int8.onnx` of a trained run, is measured in the
same way. All files run in ONNX Runtime, which computes in float between the QDQ pairs.

A PRESET other than XINT8 is that of Quark's older interface, and needs the options of docs/quark-presets.md.

    top-1       on the test images, the difference from float, and the standard error of that difference
    same        share of images with the float model's class
    dB          SQNR of the logits against float
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from algorithms import CONF, quantized, settings_of
from numpy.typing import NDArray

from qatkit import models
from qatkit.config.compose import compose_config
from qatkit.data import DataModule
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.phase import set_phase
from qatkit.run.build import data_of
from qatkit.run.export import write_float_file
from qatkit_verify.session import open_session

Array = NDArray[np.float32]
_PLAIN = (
    "backend=npu_cnn",
    "algorithm_choice=all",
    "calibration=mse",
    "trainer=cpu",
    "trainer.progress=false",
)
_OPTIONS = {"session.disable_quant_qdq": "1"}


def logits(file: Path, images: Array, batch: int = 50) -> Array:
    """Returns the file's first output for all images."""
    session = open_session(file, threads=1, options=_OPTIONS)
    name = session.get_inputs()[0].name
    parts = np.split(images, range(batch, len(images), batch))
    return np.concatenate([session.run(None, {name: part})[0] for part in parts])


def line(name: str, exact: Array, found: Array, labels: NDArray[np.int64]) -> str:
    """Returns the line to print for a file."""
    right, before = (one.argmax(1) == labels for one in (found, exact))
    change = 100.0 * (right.astype(float) - before)
    same = 100 * (found.argmax(1) == exact.argmax(1)).mean()
    decibel = 10 * np.log10(np.square(exact).sum() / np.square(found - exact).sum())
    return (
        f"{name}: top-1 {100 * right.mean():.2f}, {change.mean():+.2f} ± {change.std() / len(change) ** 0.5:.2f}, "
        f"same {same:.2f} %, {decibel:.2f} dB"
    )


def ours(kind: str, overrides: Sequence[str], data: DataModule, file: Path) -> None:
    """Writes qatkit's file for a list of algorithms."""
    module = quantized(compose_config(CONF, [*overrides, *settings_of(kind)]), data)
    set_phase(module.graph, observe=False, quantize=True)
    example = torch.zeros(2, *next(iter(data.test_subset(1, 1)))[0].shape[1:])
    export_onnx(module.convert().graph, example, file)


def measure(args: argparse.Namespace, overrides: Sequence[str], folder: Path) -> None:
    """Prints the accuracy of the float file, then one line per file."""
    overrides = [*_PLAIN, f"calibration.images={args.calibration}", *overrides]
    config = compose_config(CONF, [*overrides, "algorithm=none"])
    data = data_of(config)
    write_float_file(models.build(config.model, data.num_classes), config, data.inputs, folder / "float.onnx")
    test = list(data.test_subset(args.images, 100))
    images = torch.cat([x for x, _ in test]).numpy()
    labels = torch.cat([torch.as_tensor(y) for _, y in test]).numpy()
    exact = logits(folder / "float.onnx", images)
    print(f"float: top-1 {100 * (exact.argmax(1) == labels).mean():.2f} of {len(labels)} images", flush=True)
    for kind in args.kinds:
        file = folder / f"{kind.replace(',', '_')}.onnx"
        ours(kind, overrides, data, file)
        print(line(f"npu_cnn, {kind}", exact, logits(file, images), labels), flush=True)
    if args.peer is not None:
        seen = torch.cat([x for x, _ in data.calibration_batches(args.calibration, 64)])
        np.save(folder / "seen.npy", seen.numpy())
        script = Path(__file__).with_name("quark_xint8.py")
        for extra in ((), ("--cle",)) if args.cle else ((),):
            command = [
                args.peer,
                script,
                folder / "float.onnx",
                folder / "seen.npy",
                folder / "peer.onnx",
                *extra,
                *(() if args.preset == "XINT8" else ("--config", args.preset, "--older")),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
            name = " ".join((f"Quark {args.preset}", *extra))
            print(line(name, exact, logits(folder / "peer.onnx", images), labels), flush=True)
    for file in args.files:
        print(line(file.name, exact, logits(file, images), labels), flush=True)


def main() -> int:
    """Measures all files with one recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="*", default=["none"])
    parser.add_argument("--peer", help="Python interpreter with AMD Quark")
    parser.add_argument("--preset", default="XINT8", help="preset of AMD Quark")
    parser.add_argument(
        "--cle", action="store_true", help="also run the preset with cross-layer equalization"
    )
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--calibration", type=int, default=256)
    parser.add_argument("--files", nargs="*", type=Path, default=[])
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(args, overrides, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
