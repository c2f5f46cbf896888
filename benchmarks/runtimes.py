"""Compares an INT8 file with its float file in several runtimes, in one process per runtime and file.

    uv run --extra openvino benchmarks/runtimes.py FOLDER --write [--models resnet18 vit_b_16]
    uv run --extra openvino benchmarks/runtimes.py FOLDER [--runtimes onnxruntime openvino] [--runs 50] [--threads 2]

The first command writes the files, which takes minutes. The second times them and needs an idle machine. The
processes take turns: one runs while the others are stopped (`qatkit_verify.runtimes.timing`). Weights are random; the
last Linear distinguishes the images (`coverage.tell_apart`), so that top-1 is meaningful. Agreement compares the INT8
file in each runtime with the same file in ONNX Runtime, over 32 images; "steps" is the mean difference of the logits
in units of their range/255.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from coverage import inputs, tell_apart
from latency import sane

from qatkit import models, report
from qatkit.config.schema import ModelConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.train.module import QATModule
from qatkit.verify.parity import against
from qatkit_verify.errors import ConfigError
from qatkit_verify.latency import from_times
from qatkit_verify.records import Comparison, Latency
from qatkit_verify.runtimes.base import REFERENCE, Runtime, load_runtimes
from qatkit_verify.runtimes.timing import times_in_turns
from qatkit_verify.session import open_session, outputs_by, run_outputs

MODELS = ("resnet18", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "vit_b_16", "swin_t",
          "convnext_tiny")  # fmt: skip
BATCH, BATCHES = 8, 4
KINDS = ("float", "int8")
HEADER = (
    "model",
    "runtime",
    "float ms [p10-p90]",
    "INT8 ms [p10-p90]",
    "float/INT8",
    "same top-1 %",
    "steps",
)


def write(name: str, size: int, folder: Path) -> None:
    """Writes NAME.float.onnx, NAME.int8.onnx and the images NAME.npy."""
    shape = (3, size, size)
    torch.manual_seed(0)
    seen = [inputs(BATCH, shape, 100 + i) for i in range(BATCHES)]
    batches = [inputs(BATCH, shape, seed) for seed in (0, 1)]
    model = sane(models.build(ModelConfig(name=name)), batches)
    tell_apart(model, seen)
    example = seen[0][:2]
    export_onnx(float_baseline(model, example), example, folder / f"{name}.float.onnx")
    module = QATModule(model, example)
    module.calibrate(batches)
    export_onnx(module.eval().convert().graph, example, folder / f"{name}.int8.onnx")
    np.save(folder / f"{name}.npy", torch.cat(seen).numpy())
    print(f"{name} written", file=sys.stderr, flush=True)


def agreement(runtime: Runtime, path: Path, images: np.ndarray, threads: int) -> Comparison:
    """Compares the outputs of the INT8 file in a runtime with those in ONNX Runtime."""
    session, execute = open_session(path, threads=threads), runtime.open(path, threads)
    batches = np.split(images, len(images) // BATCH)
    _, found = against(
        {REFERENCE: lambda batch: run_outputs(session, batch)},
        lambda batch: outputs_by(execute, session, batch),
        path,
        batches,
    )
    return found[REFERENCE]


def timed(name: str, args: argparse.Namespace, runtimes: dict[str, Runtime]) -> None:
    """Times one model and prints one row per runtime."""
    files = {kind: args.folder / f"{name}.{kind}.onnx" for kind in KINDS}
    images = np.load(args.folder / f"{name}.npy")
    feeds = {kind: {"input": images[:1]} for kind in KINDS}
    found = times_in_turns(runtimes, files, feeds, threads=args.threads, runs=args.runs)
    for path, runtime in runtimes.items():
        times = found[path]
        if isinstance(times, str):
            print(row((name, runtime.name, times)), flush=True)
            continue
        exact, int8 = (from_times(times["float"], times[kind], 1, args.threads) for kind in KINDS)
        near = agreement(runtime, files["int8"], images, args.threads) if args.agreement else None
        same = ("-", "-") if near is None else (f"{100 * near.agreement:.1f}", f"{near.mean_steps:.3f}")
        ratio = f"{int8.ratio:.2f} [{int8.ratio_p10:.2f}-{int8.ratio_p90:.2f}]"
        print(row((name, runtime.name, span(exact), span(int8), ratio, *same)), flush=True)


def span(one: Latency) -> str:
    """Returns the median, p10 and p90 as text."""
    return f"{one.median_ms:.2f} [{one.p10_ms:.2f}-{one.p90_ms:.2f}]"


def row(cells: tuple[str, ...]) -> str:
    """Returns a line of the table."""
    return "  ".join(
        cell.ljust(width) for cell, width in zip(cells, (18, 11, 24, 24, 18, 12, 5), strict=False)
    )


def main() -> int:
    """Writes or times the files; returns 2 for a missing runtime or an unknown model."""
    parser = argparse.ArgumentParser(description="Compares INT8 with float files in several runtimes.")
    parser.add_argument("folder", type=Path, help="folder for the files")
    parser.add_argument("--write", action="store_true", help="only write the files, without timing them")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="torchvision.models names")
    parser.add_argument(
        "--runtimes", nargs="+", default=["onnxruntime", "openvino"], help="values of verify.runtimes"
    )
    parser.add_argument("--runs", type=int, default=50, help="timed runs of each file")
    parser.add_argument("--threads", type=int, default=2, help="threads of each runtime")
    parser.add_argument("--size", type=int, default=224, help="side of the square input in pixels")
    parser.add_argument("--no-agreement", dest="agreement", action="store_false", help="measure only latency")
    args = parser.parse_args()
    try:
        runtimes = load_runtimes(args.runtimes)
        if args.write:
            args.folder.mkdir(parents=True, exist_ok=True)
            for name in args.models:
                write(name, args.size, args.folder)
            return 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(row(HEADER))
    for name in args.models:
        timed(name, args, runtimes)
    versions = {key: value for one in runtimes.values() for key, value in one.versions().items()}
    print(
        f"\nbatch 1, {args.runs} rounds, {args.threads} threads; {report.this_hardware(args.threads).cpu}; {versions}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
