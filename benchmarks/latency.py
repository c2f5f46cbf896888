"""Measures the latency of INT8 files of qatkit and onnxruntime.quantization against float, in one process.

    uv run benchmarks/latency.py [--models resnet50 vit_b_16] [--rounds 50] [--threads 2] [--json FILE]

Latency does not depend on the values of the weights, so every model has random weights of a reasonable scale:
BatchNorm statistics come from a few random batches, and heads that torchvision initializes with zeros are drawn at
random (otherwise every logit would be constant). Four files are timed against each other, round by round:

    original   the unchanged model, in float
    fused      the same model in float, with BatchNorm folded and attention decomposed into single operators
    int8       qatkit's file, calibrated on random images
    static     `onnxruntime.quantization.quantize_static` of the original file with the same images: uint8
               activations, per-channel int8 weights, QDQ, min-max

The faster of the two float files is the baseline. Ratios are taken within each round, then summarized; the INT8 file
is faster if a ratio is above 1. Compare figures only within one run, since the speed of a machine drifts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

from qatkit import models, report
from qatkit.config.schema import ModelConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.quant.backends import FBGEMM
from qatkit.records.results import Audit
from qatkit.train.module import QATModule
from qatkit.verify.audit import audit
from qatkit.verify.checks.audit import audit_line
from qatkit_verify.errors import ConfigError, counted
from qatkit_verify.files import write_text
from qatkit_verify.latency import latency
from qatkit_verify.records import Latency

MODELS = ("resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "vit_b_16")
CALIBRATION_BATCHES, BATCH = 2, 8
HEADER = ("model", "baseline", "float ms", "INT8 ms", "static ms", "float/INT8 [p10-p90]",
          "static/INT8 [p10-p90]", "float MB", "INT8 MB", "size")  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """The time of another file divided by that of the INT8 file in the same round: median, p10 and p90."""

    median: float
    p10: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.p10:.2f}-{self.p90:.2f}]"


@dataclass(frozen=True)
class Measured:
    """The figures of one model: milliseconds, ratios, bytes and the audit of the INT8 file."""

    baseline: str  # the faster one of the two float files
    median_ms: dict[str, float]
    over_float: Ratio
    over_static: Ratio
    bytes: dict[str, int]
    audit: str
    problems: tuple[str, ...]

    def row(self, name: str) -> tuple[str, ...]:
        """Returns the cells in the order of `HEADER`."""
        size, int8 = self.bytes[self.baseline], self.bytes["int8"]
        times = (self.median_ms[file] for file in (self.baseline, "int8", "static"))
        return (name, self.baseline, *(f"{time:.2f}" for time in times), str(self.over_float),
                str(self.over_static), f"{size / 1e6:.2f}", f"{int8 / 1e6:.2f}",
                f"{int8 / size:.3f}")  # fmt: skip


class _Images(quantization.CalibrationDataReader):  # type: ignore[misc]
    """The calibration batches in the form that quantize_static expects."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> dict[str, object] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"input": batch.numpy()}


def sane(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """Takes BatchNorm statistics from `batches`, so that activations neither vanish nor explode.

    Linears with zero weights get random ones. Returns the model in eval mode.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # a plain average over the batches
        elif isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.trunc_normal_(module.weight, std=0.02)
    model.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return model.eval()


def random_batches(shape: tuple[int, ...]) -> list[Tensor]:
    """Returns calibration batches of random noise."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, *shape, generator=generator) for _ in range(CALIBRATION_BATCHES)]


def static_quantize(source: Path, target: Path, batches: list[Tensor], *, prepare: bool = True) -> None:
    """Runs `quantize_static` on its default operator types; `prepare` adds the recommended pre-processing."""
    prepared = target.with_suffix(".prepared.onnx") if prepare else source
    if prepare:
        quant_pre_process(str(source), str(prepared))
    quantization.quantize_static(
        str(prepared),
        str(target),
        _Images(batches),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        calibrate_method=quantization.CalibrationMethod.MinMax,
    )


def write_files(name: str, size: int, folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Writes the four files of one model and returns them, INT8 first, with the operators that qatkit left float."""
    batches = random_batches((3, size, size))
    torch.manual_seed(0)
    model, example = sane(models.build(ModelConfig(name=name)), batches), batches[0][:2]
    files = {key: folder / f"{name}.{key}.onnx" for key in ("int8", "original", "fused", "static")}
    _say(f"{name}: exporting the float files")
    export_onnx(model, example, files["original"])
    export_onnx(float_baseline(model, example), example, files["fused"])
    _say(f"{name}: quantizing with qatkit")
    module = QATModule(model, example, backend=FBGEMM)
    module.calibrate(batches)
    module.eval()
    converted = module.convert()
    export_onnx(converted.graph, example, files["int8"])
    _say(f"{name}: quantizing with quantize_static")
    with without_logs():
        static_quantize(files["original"], files["static"], batches)
    return files, [site for site, _ in module.skipped + converted.skipped]


def measure(name: str, size: int, rounds: int, threads: int) -> Measured:
    """Writes, audits and times the files of one model."""
    with tempfile.TemporaryDirectory() as folder:
        files, skipped = write_files(name, size, Path(folder))
        options = FBGEMM.session_options
        _say(f"{name}: timing {rounds} rounds")
        times = latency(files, (3, size, size), threads=threads, runs=rounds, options=options)
        found: Audit = audit(files["int8"], options=options, threads=threads, allow_float=skipped)
        sizes = {key: path.stat().st_size for key, path in files.items()}
    baseline = min(("original", "fused"), key=lambda key: times[key].median_ms)
    return Measured(
        baseline,
        {key: one.median_ms for key, one in times.items()},
        _over_int8(times[baseline]),
        _over_int8(times["static"]),
        sizes,
        audit_line(found),
        found.problems,
    )


def _over_int8(other: Latency) -> Ratio:
    """Returns the inverse of the ratios of `latency`, which are those of the first file (INT8) over the other."""
    return Ratio(1 / other.ratio, 1 / other.ratio_p90, 1 / other.ratio_p10)


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Silences quantize_static, which logs each step on the root logger and warns about its own file format."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(results: dict[str, Measured], args: argparse.Namespace) -> None:
    """Prints the table, the audit of each INT8 file, the settings, the hardware and the versions."""
    rows = [HEADER, *(measured.row(name) for name, measured in results.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
    for name, measured in results.items():
        print(f"{name} {measured.audit}; {counted(len(measured.problems), 'problem')}")
        for problem in measured.problems:
            print(f"  problem: {problem}")
    hardware = report.this_hardware(args.threads)
    print(f"\nbatch 1, {args.size}x{args.size}, {args.rounds} interleaved rounds, {args.threads} threads")
    print(f"{hardware.cpu}, {hardware.cores} cores, {' '.join(hardware.isa)}")
    print(", ".join(f"{name} {version}" for name, version in report.installed_versions().items()))


def main() -> int:
    """Measures every requested model; returns 2 for a name that torchvision does not have."""
    parser = argparse.ArgumentParser(
        description="Measures the latency of float files and of INT8 files of qatkit and quantize_static."
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="torchvision.models names")
    parser.add_argument("--rounds", type=int, default=50, help="timed runs of each file")
    parser.add_argument("--threads", type=int, default=2, help="intra-op threads")
    parser.add_argument("--size", type=int, default=224, help="side of the square input in pixels")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    try:
        results = {name: measure(name, args.size, args.rounds, args.threads) for name in args.models}
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(results, args)
    if args.json is not None:
        record = {
            "size": args.size,
            "rounds": args.rounds,
            "hardware": asdict(report.this_hardware(args.threads)),
            "versions": report.installed_versions(),
            "models": {name: asdict(measured) for name, measured in results.items()},
        }
        write_text(args.json, json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
