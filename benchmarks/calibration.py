"""Measures the cost of calibration: each observer against plain float forward passes of the same images.

    uv run benchmarks/calibration.py [--models resnet50 vit_b_16] [--images 64] [--rounds 5] [--threads 2]
    uv run benchmarks/calibration.py --static       also quantize_static of ONNX Runtime (needs gigabytes of memory)
    uv run benchmarks/calibration.py --memory       peak memory with 32 and with 512 images instead

Weights and images are random, scaled as in latency.py. The time of a calibration includes the float passes, the
observers, and computing and aligning the scales. All calibrations are timed in turns in one process, and the ratio to
the float passes is taken within a round: 1.2 means 20 % more. Each run of quantize_static and each measurement of
--memory has its own process, which makes the images batch by batch and reads its peak resident memory at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import latency
import torch
from onnxruntime import quantization
from torch import Tensor, fx

from qatkit import models, report
from qatkit.calibration import calibrate
from qatkit.choose.judge import Runtime
from qatkit.choose.tournament import tournament
from qatkit.config.schema import ExportConfig, ModelConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.graph.quantizers import fake_quantizers
from qatkit.quant import observers
from qatkit.train.module import QATModule

KINDS: dict[str, Callable[[], observers.Observer]] = {
    "minmax": observers.MinMaxObserver,
    "percentile": observers.PercentileObserver,
    "entropy": observers.EntropyObserver,
    "mse": observers.MSEObserver,
    "distribution": observers.DistributionObserver,
}
# calibration=auto. Its time includes exports, which take equally long for any number of images.
TOURNAMENT = "tournament"
METHODS = ("MinMax", "Percentile", "Entropy")


@dataclass(frozen=True)
class Job:
    """A model, the size, batch size and number of its calibration images, and the number of threads."""

    model: str
    size: int
    batch: int
    threads: int
    images: int


def images(job: Job) -> Iterator[Tensor]:
    """Yields the calibration batches, made one at a time; every call yields the same ones."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(job.images // job.batch):
        yield torch.randn(job.batch, 3, job.size, job.size, generator=generator)


def prepared(job: Job) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the float graph, and the graph with a FakeQuantize on each activation to quantize."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    model = latency.sane(models.build(ModelConfig(name=job.model)), [next(images(job))])
    example = next(images(job))[:2]
    graph = QATModule(model, example).eval().graph
    assert isinstance(graph, fx.GraphModule)
    base = float_baseline(model, example)
    assert isinstance(base, fx.GraphModule)
    return base, graph


def observe_with(graph: fx.GraphModule, kind: str) -> None:
    """Gives every FakeQuantize that has an observer a new one of this kind."""
    for quantizer in fake_quantizers(graph).values():
        if quantizer.observer is not None:
            quantizer.observer = KINDS[kind]()


def seconds(run: Callable[[], object]) -> float:
    """Returns the wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compete(job: Job, graph: fx.GraphModule, batches: list[Tensor]) -> None:
    """Runs `calibration=auto`: observes three quarters of the batches and compares methods on the rest."""
    observe_with(graph, "mse")
    labelled = [(batch, torch.zeros(len(batch), dtype=torch.int64)) for batch in batches]
    observed, held_out = [pair for i, pair in enumerate(labelled) if i % 4 != 3], labelled[3::4]
    calibrate(graph, (batch for batch, _ in observed))
    tournament(graph, batches[0][:2], observed, held_out, Runtime(ExportConfig(), {}, job.threads, False))


def measure(job: Job, rounds: int, kinds: list[str]) -> dict[str, list[float]]:
    """Returns the seconds of the float passes and of each calibration, for every round."""
    base, graph = prepared(job)
    batches = list(images(job))

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                base(batch)

    times: dict[str, list[float]] = {"float": [], **{kind: [] for kind in kinds}}
    forward()
    for _ in range(rounds):
        times["float"].append(seconds(forward))
        for kind in kinds:
            if kind == TOURNAMENT:
                times[kind].append(seconds(lambda: compete(job, graph, batches)))
                continue
            observe_with(graph, kind)
            times[kind].append(seconds(lambda: calibrate(graph, batches)))
    return times


def peak_mb() -> float:
    """Returns this process's peak resident memory in MB (Linux; ru_maxrss would include the parent's)."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def calibrate_alone(job: Job, kind: str) -> tuple[float, float, float]:
    """Returns the seconds of a calibration, and the peak memory in MB before and after it."""
    _, graph = prepared(job)
    observe_with(graph, kind)
    with torch.no_grad():
        graph(next(images(job)))
    before = peak_mb()
    return seconds(lambda: calibrate(graph, images(job))), before, peak_mb()


class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, job: Job) -> None:
        self._batches = images(job)

    def get_next(self) -> dict[str, object] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"input": batch.numpy()}


def quantize_static_alone(job: Job, method: str) -> tuple[float, float, float]:
    """Returns the figures of `calibrate_alone` for quantize_static on the fused float file."""
    with tempfile.TemporaryDirectory() as folder, latency.without_logs():
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        export_onnx(prepared(job)[0], next(images(job))[:2], source)
        before = peak_mb()

        def run() -> None:
            quantization.quantize_static(
                str(source), str(target), _Reader(job), per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                calibrate_method=quantization.CalibrationMethod[method],
            )  # fmt: skip

        with contextlib.redirect_stdout(sys.stderr):  # quantize_static prints its progress
            return seconds(run), before, peak_mb()


Alone = Callable[[Job, str], tuple[float, float, float]]


def alone(task: Alone, job: Job, what: str) -> tuple[float, float, float]:
    """Runs a task in its own process and returns its figures."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(task, job, what).result()


def print_rows(rows: list[tuple[str, ...]]) -> None:
    """Prints a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def time_rows(name: str, times: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Returns the rows of a model: median and least seconds, and the ratio to float (median, minimum, maximum)."""
    rows: list[tuple[str, ...]] = []
    for kind, mine in times.items():
        ratios = sorted(a / b for a, b in zip(mine, times["float"], strict=True))
        ratio = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]"
        rows.append((name, kind, f"{statistics.median(mine):.2f}", f"{min(mine):.2f}", ratio))
    return rows


def main() -> int:
    """Measures all models, and prints the tables of time and memory."""
    parser = argparse.ArgumentParser(description="Measures the time and memory of calibration.")
    parser.add_argument("--models", nargs="+", default=["resnet50", "vit_b_16"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=[*KINDS, TOURNAMENT])
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="side of the square input in pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--static", action="store_true", help="also measure quantize_static, once per method")
    parser.add_argument(
        "--memory", action="store_true", help="measure peak memory with 32 and 512 images instead"
    )
    args = parser.parse_args()
    timed: list[tuple[str, ...]] = [("model", "calibration", "s", "min s", "ratio to float [min-max]")]
    used: list[tuple[str, ...]] = [
        ("model", "calibration", "images", "s", "peak MB before", "peak MB", "increase MB")
    ]
    for name in args.models:
        job = Job(name, args.size, args.batch, args.threads, args.images)
        if not args.memory:
            timed += time_rows(name, measure(job, args.rounds, args.kinds))
        counts = (32, 512) if args.memory else ()
        runs: list[tuple[Alone, str, int]] = [
            (calibrate_alone, kind, n) for kind in ("minmax", "entropy") for n in counts
        ]
        if args.static:
            runs += [(quantize_static_alone, method, args.images) for method in METHODS]
        for task, what, n in runs:
            label = what if task is calibrate_alone else f"quantize_static {what}"
            one = Job(name, args.size, args.batch, args.threads, n)
            latency._say(f"{name}: {label}, {n} images")
            took, before, after = alone(task, one, what)
            used.append((name, label, str(n), f"{took:.1f}", f"{before:.0f}", f"{after:.0f}",
                         f"{after - before:.0f}"))  # fmt: skip
    for rows in (timed, used):
        if len(rows) > 1:
            print_rows(list(rows))
            print()
    hardware = report.this_hardware(args.threads)
    print(f"{args.images} images, batch {args.batch}, {args.size}x{args.size}, {args.rounds} interleaved rounds, "
          f"{args.threads} threads\n{hardware.cpu}, {hardware.cores} cores, {' '.join(hardware.isa)}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
