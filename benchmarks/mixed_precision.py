"""Is the front of `precision=auto` worth its search? Against "the k most sensitive operators float", for each k.

    uv run benchmarks/mixed_precision.py recipe=resnet18_cifar10_ptq data.root=DIR model.checkpoint=FILE
        [--points 24] [--every 2] [--images 1000]

The rest of the command line is train.py's; ranges are those of calibration=mse, without algorithms, so that there is an
error to save. Files are timed in turns, and judged in ONNX Runtime on test images by the SQNR of their logits against
float's. Printed is every file with its predicted and measured milliseconds, and then

    beaten     files of the k most sensitive with a lower error than every file of the front that is as fast
    margin     dB by which the front, drawn with straight lines, lies above each of these files at its time: least, mean
    off        predicted against measured milliseconds, largest and median share
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qatkit import models
from qatkit.config.compose import compose_config
from qatkit.module import QATModule
from qatkit.precision.costs import Costs
from qatkit.run.build import data_of, example_batch, qat_module
from qatkit.run.calibrate import calibrate_module
from qatkit.run.judge import Judge
from qatkit.run.mixed import FLOAT, INT8, Builder, Search

CONF = Path(__file__).resolve().parent.parent / "conf"
_EXACT = 80.0  # dB that stand for no difference


@dataclass(frozen=True)
class Row:
    """One file."""

    kind: str
    operators: int
    predicted: float
    ms: float
    sqnr: float
    top1: float | None


def searched(overrides: Sequence[str], points: int, images: int, folder: Path) -> Search:
    """The search over a recipe's calibrated module, its files judged on test images."""
    more = ["calibration=mse", "algorithm=none", "algorithm_choice=all", "trainer=cpu", "precision=auto"]
    config = compose_config(CONF, [*overrides, *more, f"precision.points={points}", "trainer.progress=false"])
    data = data_of(config)
    model = models.build(config.model, data.num_classes).eval()
    module = qat_module(config, model, data.input_shape, QATModule)
    example = example_batch(config, data.input_shape)
    calibrated = calibrate_module(module, data, config, example)
    module.eval().ready_to_convert()
    search = Search(Builder(config, model, data, module, calibrated), folder)
    search.judge = Judge(
        module.graph, example, list(data.test_subset(images, 50)), folder, search.runtime, "test"
    )
    return search


def measured(search: Search, points: int, every: int) -> list[Row]:
    """Every file, timed in turns."""
    costs, before = search.costs()
    search.config.precision.points = points
    operators, losses = search.layouts.operators, search.losses()
    ranked = sorted(operators, key=losses.of_operator, reverse=True)
    sets: dict[str, tuple[str, frozenset[str]]] = {
        INT8: ("end", frozenset()),
        FLOAT: ("end", frozenset(operators)),
    }
    for number, choice in enumerate(search.predicted(costs)):
        sets[f"front{number}"] = ("front", choice.floats)
    for k in range(every, len(operators), every):
        sets[f"top{k}"] = ("most sensitive", frozenset(ranked[:k]))
    for name, (_, floats) in sets.items():
        if name not in search.files:
            search.files[name] = search.builder.write(sorted(floats), search.folder / f"{name}.onnx")
    times = search.clock({name: search.files[name] for name in sets})
    return [_row(search, costs, name, *sets[name], times, before) for name in sets]


def _row(
    search: Search,
    costs: Costs,
    name: str,
    kind: str,
    floats: frozenset[str],
    times: dict[str, float],
    before: dict[str, float],
) -> Row:
    verdict = search.judge.of_float() if name == FLOAT else search.judge.of_file(search.files[name], name)
    layout = search.layouts(floats)
    share = costs.share(layout)
    moved = (1 - share) * times[INT8] / before[INT8] + share * times[FLOAT] / before[FLOAT]
    sqnr = -10 * np.log10(verdict.error) if verdict.error else _EXACT
    return Row(kind, len(layout.floats), costs(layout) * moved, times[name], float(sqnr), verdict.top1)


def summary(rows: Sequence[Row]) -> str:
    """Beaten, margin, off."""
    front = sorted((row for row in rows if row.kind != "most sensitive"), key=lambda row: row.ms)
    others = [row for row in rows if row.kind == "most sensitive"]
    best = np.maximum.accumulate([row.sqnr for row in front])
    times = [row.ms for row in front]
    margins = [float(np.interp(row.ms, times, best)) - row.sqnr for row in others]
    beaten = sum(
        row.sqnr > max((one.sqnr for one in front if one.ms <= row.ms), default=-99.0) for row in others
    )
    off = [abs(row.predicted / row.ms - 1) for row in rows]
    return (
        f"beaten by {beaten} of {len(others)}; margin {min(margins):+.1f} dB least, {np.mean(margins):+.1f} mean; "
        f"off by {100 * max(off):.1f} % at most, {100 * float(np.median(off)):.1f} % median"
    )


def main() -> None:
    """Measures one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=24)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--images", type=int, default=1000)
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(searched(overrides, args.points, args.images, Path(folder)), args.points, args.every)
    for row in sorted(rows, key=lambda row: row.ms):
        top1 = "" if row.top1 is None else f"  top-1 {row.top1:.2f}"
        print(
            f"{row.kind:15s} {row.operators:3d} float  predicted {row.predicted:.3f}  measured {row.ms:.3f} ms"
            f" ({100 * (row.predicted / row.ms - 1):+.1f} %)  {row.sqnr:.1f} dB{top1}"
        )
    print(summary(rows))


if __name__ == "__main__":
    main()
