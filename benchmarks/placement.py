"""Measures the speed-up of a measured placement over float, the backend's table and quantize_static.

    uv run benchmarks/placement.py --models efficientnet_b0 mobilenet_v3_large [--threads 2] [--again] [--record]

A placement says which operators run in float and which in int8; by default it comes from a table of the backend. For
each model, the comparison of `placement=measured` runs as in train.py. The chosen file is then timed in three
sessions against the float file (the faster of fused and original), the file of the backend's table, and the files of
`quantize_static` with and without its pre-processing. Weights and images are random. "off" is the relative error of the
chosen file's predicted time. With --again the comparison runs a second time, and "twice" is the time of the second
choice over that of the first. Run it on an idle machine, otherwise the figures mean nothing; --record writes them into
docs/coverage.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from coverage import PAGE, RECORD, SIZES, page
from latency import random_batches, static_quantize, without_logs
from torch import Tensor

from qatkit import models, report
from qatkit.choose.placement.tournament import Tournament
from qatkit.config.schema import Config, ModelConfig, TrainerConfig, VerifyConfig
from qatkit.data.inputs import ImageInputs
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.run.build import qat_module
from qatkit.train.module import QATModule
from qatkit_verify.files import write_text
from qatkit_verify.placement.quiet import timed_quietly
from qatkit_verify.placement.record import FLOAT, TABLE, Placed
from qatkit_verify.saturation import saturates_here

MODELS = ("efficientnet_b0", "mobilenet_v3_large", "mobilenet_v2", "resnet50")
HEADER = ("model", "float ms", "table ms", "placed ms", "float/table", "float/placed", "static/placed",
          "static without pre-processing/placed", "float operators", "SiLUs int8",
          "off", "noise", "quiet", "twice", "seconds")  # fmt: skip
_SESSIONS, _RUNS = 3, 40


@dataclass(frozen=True)
class Row:
    """The results of a model.

    Attributes:
        model: its name.
        ms: milliseconds by file.
        quiet: whether the machine was quiet.
        placed: the placement that was measured and chosen.
        off: the relative error of the predicted time of the chosen file; None if no time was predicted.
        twice: the time of a second choice over that of the first; None without --again.
        seconds: how long the choice took.
    """

    model: str
    ms: dict[str, float]
    quiet: bool
    placed: Placed
    off: float | None
    twice: float | None
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """Returns the cells in the order of `HEADER`."""
        ms, sites = self.ms, self.placed.sites
        ratios = (
            self.over(FLOAT, TABLE),
            *(self.over(name, "placed") for name in (FLOAT, "static", "plain")),
        )
        return (
            self.model, *(f"{ms[name]:.3f}" for name in (FLOAT, TABLE, "placed")), *(f"{one:.2f}" for one in ratios),
            str(len(sites.floats)), str(len(sites.opened)), _share(self.off), f"{100 * self.placed.noise:.1f} %",
            "yes" if self.quiet and self.placed.quiet else "no",
            "-" if self.twice is None else f"{self.twice:.3f}", f"{self.seconds:.0f}",
        )  # fmt: skip

    def over(self, name: str, other: str) -> float:
        """Returns the time of the file `name` divided by that of `other`."""
        return self.ms[name] / self.ms[other]

    def recorded(self) -> dict[str, object]:
        """Returns the figures that docs/coverage.md shows."""
        machine = self.placed.machine
        isa = "its AVX2 kernels" if saturates_here() else ", ".join(machine.isa)
        where = f"{machine.cpu} ({isa}), ONNX Runtime {machine.onnxruntime}"
        return {
            "float_over_table": self.over(FLOAT, TABLE),
            "float_over_placed": self.over(FLOAT, "placed"),
            "static_over_placed": min(self.over("static", "placed"), self.over("plain", "placed")),
            "noise": self.placed.noise,
            "machine": where,
        }


def record(row: Row) -> None:
    """Writes a model's figures, for the kernels of this machine, into docs/coverage.json and updates the page."""
    rows = json.loads(RECORD.read_text())
    kernels = "avx2" if saturates_here() else "vnni"
    rows[row.model].setdefault("speed", {})[kernels] = row.recorded()
    write_text(RECORD, json.dumps(rows, indent=1, sort_keys=True) + "\n")
    write_text(PAGE, page(rows))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def run(name: str, args: argparse.Namespace) -> Row:
    """Chooses the placement of one model, times its files and returns its row."""
    torch.manual_seed(0)
    model = models.build(ModelConfig(name=name, num_classes=1000)).eval()
    size = max(args.size, SIZES.get(name, 0))  # Inception v3 gets at least the size it was made for
    shape = (3, size, size)
    verify = VerifyConfig(threads=args.threads)
    config = Config(
        model=ModelConfig(name=name), verify=verify, trainer=TrainerConfig(progress=not args.quiet)
    )
    with tempfile.TemporaryDirectory() as new:
        folder = Path(new)
        start = time.monotonic()
        first = _tournament(config, model, shape, folder / "first")
        seconds = time.monotonic() - start
        files = {FLOAT: folder / "first" / "float.onnx", TABLE: folder / "first" / "fixed.onnx"}
        files["placed"] = folder / "first" / f"{first.chosen}.onnx"
        files |= _static(model, random_batches(shape), folder)
        if args.again:
            second = _tournament(config, model, shape, folder / "second")
            files["second"] = folder / "second" / f"{second.chosen}.onnx"
        timed = timed_quietly(files, shape, batch=1, threads=args.threads, runs=_RUNS, sessions=_SESSIONS)
        ms = {key: min(seen) for key, seen in timed.ms.items()}
        ms[FLOAT] = min(ms[FLOAT], ms["original"])
    best = first.of(first.chosen)
    off = None if best.predicted_ms is None else best.predicted_ms / best.ms - 1
    twice = ms["second"] / ms["placed"] if args.again else None
    return Row(name, ms, timed.quiet, first, off, twice, seconds)


def _tournament(config: Config, model: torch.nn.Module, shape: tuple[int, ...], folder: Path) -> Placed:
    folder.mkdir()
    inputs = ImageInputs(shape)
    return Tournament(config, model, inputs, qat_module(config, model, inputs, QATModule), folder).run()


def _static(model: torch.nn.Module, batches: list[Tensor], folder: Path) -> dict[str, Path]:
    """Writes the original float file and the files of quantize_static with and without its pre-processing."""
    source = folder / "original.onnx"
    export_onnx(model, batches[0][:2], source)
    with without_logs():
        static_quantize(source, folder / "static.onnx", batches)
        static_quantize(source, folder / "plain.onnx", batches, prepare=False)
    return {name: folder / f"{name}.onnx" for name in ("original", "static", "plain")}


def main() -> None:
    """Runs all models, and prints one line after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--again", action="store_true", help="measure each placement twice")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.add_argument("--json", type=Path, help="JSON file for the figures")
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the figures into docs/coverage.md if the machine was quiet",
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    hardware = report.this_hardware(args.threads)
    print(
        f"{hardware.cpu}, {', '.join(hardware.isa)}; {args.threads} threads, batch 1, {args.size}x{args.size}"
    )
    print(" | ".join(HEADER), flush=True)
    rows = []
    for name in args.models:
        rows.append(run(name, args))
        print(" | ".join(rows[-1].cells()), flush=True)
        if args.record and rows[-1].quiet and rows[-1].placed.quiet:
            record(rows[-1])
        if args.json:
            stored = [{**asdict(row), "placed": row.placed.as_dict()} for row in rows]
            write_text(args.json, json.dumps({"hardware": asdict(hardware), "rows": stored}, indent=1) + "\n")


if __name__ == "__main__":
    main()
