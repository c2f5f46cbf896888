"""Compares the Pareto front of `precision=auto` with "the k most sensitive operators in float" at equal latency.

    uv run benchmarks/mixed_precision.py recipe=resnet18_cifar10_ptq data.root=DIR model.checkpoint=FILE
        [--every 3] [--images 1000]

The other arguments are those of train.py; ranges are those of calibration=mse, without algorithms, so that there is an
error to reduce. For every third k, a file with the k most sensitive operators in float is compared with the best
mixture of the predicted front whose predicted time is no longer. Files are timed in turns and judged by the SQNR of
their logits against float, in ONNX Runtime on test images. It prints predicted and measured milliseconds of every
file, then:

    beaten     pairs in which the file with the k most sensitive is better by more than 0.1 dB and, as measured,
               at most 2 % slower
    gain       dB by which the file of the front is better, minimum and mean
    off        relative error of predicted milliseconds, maximum and median, over files that the search had not timed
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qatkit import models
from qatkit.choose.judge import Judge
from qatkit.choose.precision.costs import Costs
from qatkit.choose.precision.mixtures import Builder
from qatkit.choose.precision.search import FLOAT, INT8, Search, drift
from qatkit.choose.ranges import calibrate_module
from qatkit.config.compose import compose_config
from qatkit.run.build import data_of, example_batch, qat_module
from qatkit.train.module import QATModule

CONF = Path(__file__).resolve().parent.parent / "conf"
_EXACT = 80.0  # dB that stand for no difference
_EQUAL, _SAME_TIME = 0.1, 1.02  # largest difference in dB and largest ratio of times that count as equal


@dataclass(frozen=True)
class Row:
    """The figures of one file; `known`: whether the search had timed it, as it always does all-int8 and all-float."""

    kind: str
    operators: int
    predicted: float
    ms: float
    sqnr: float
    score: float | None
    known: bool


def searched(overrides: Sequence[str], images: int, folder: Path) -> Search:
    """Returns the search over a recipe's calibrated module; it judges its files on test images."""
    more = ["calibration=mse", "algorithm=none", "algorithm_choice=all", "trainer=cpu", "precision=auto"]
    config = compose_config(CONF, [*overrides, *more, "trainer.progress=false"])
    data = data_of(config)
    model = models.build(config.model, data.num_classes).eval()
    module = qat_module(config, model, data.inputs, QATModule)
    example = example_batch(config, data.inputs)
    calibrated = calibrate_module(module, data, config, example)
    module.eval().ready_to_convert()
    search = Search(Builder(config, model, data, module, calibrated), folder)
    search.judge = Judge(
        module.graph, example, list(data.test_subset(images, 50)), folder, search.runtime, "test"
    )
    return search


def measured(search: Search, every: int) -> list[Row]:
    """Times all files in turns; returns the rows of all int8, all float, then a pair (top k, front) for each k."""
    costs, before = search.costs()
    known = {trial.layout.floats for trial in search.rounds(costs, before)}
    operators, price, ranked = search.layouts.operators, search.price(costs), search.ranking
    front = search.front(costs)
    sets: dict[str, tuple[str, frozenset[str]]] = {
        INT8: ("end", frozenset()),
        FLOAT: ("end", frozenset(operators)),
    }
    for k in range(every, len(operators), every):
        most = frozenset(ranked[:k])
        if not search.mixtures([most]):
            continue
        within = [choice for choice in front if choice.ms <= price(most)[1]]
        sets[f"top{k}"] = ("most sensitive", most)
        sets[f"front{k}"] = ("front", min(within, key=lambda choice: choice.loss).floats)
    for name, (_, floats) in sets.items():
        if floats == frozenset(operators):  # the float file already exists
            search.files[name] = search.files[FLOAT]
        elif name not in search.files:
            search.files[name] = search.builder.write(sorted(floats), search.folder / f"{name}.onnx")
    times = search.clock({name: search.files[name] for name in sets})
    return [_row(search, costs, name, *sets[name], times, before, known) for name in sets]


def _row(
    search: Search,
    costs: Costs,
    name: str,
    kind: str,
    floats: frozenset[str],
    times: dict[str, float],
    before: dict[str, float],
    known: Collection[frozenset[str]],
) -> Row:
    file = search.files[name]
    verdict = search.judge.of_float() if file == search.files[FLOAT] else search.judge.of_file(file, name)
    layout = search.layouts(floats)
    moved = drift(costs.share(layout), times, before)
    sqnr = -10 * np.log10(verdict.error) if verdict.error else _EXACT
    seen = kind == "end" or layout.floats in known
    return Row(kind, len(layout.floats), costs(layout) * moved, times[name], float(sqnr), verdict.score, seen)


def summary(rows: Sequence[Row]) -> str:
    """Returns the line with the figures "beaten", "gain" and "off"."""
    pairs = list(zip(rows[2::2], rows[3::2], strict=True))
    beaten = sum(top.sqnr > own.sqnr + _EQUAL and top.ms <= own.ms * _SAME_TIME for top, own in pairs)
    gains = [own.sqnr - top.sqnr for top, own in pairs]
    off = [abs(row.predicted / row.ms - 1) for row in rows if not row.known]
    return (
        f"beaten in {beaten} of {len(pairs)} pairs; gain: minimum {min(gains):+.1f} dB, mean {np.mean(gains):+.1f} dB; "
        f"off: maximum {100 * max(off):.1f} %, median {100 * float(np.median(off)):.1f} %"
    )


def main() -> None:
    """Measures one recipe and prints the figures of every file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--images", type=int, default=1000)
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(searched(overrides, args.images, Path(folder)), args.every)
    for row in rows:
        top1 = "" if row.score is None else f"  top-1 {row.score:.2f}"
        known = "  timed before" if row.known and row.kind != "end" else ""
        print(
            f"{row.kind:15s} {row.operators:3d} float  predicted {row.predicted:.3f}  measured {row.ms:.3f} ms"
            f" ({100 * (row.predicted / row.ms - 1):+.1f} %)  {row.sqnr:.1f} dB{top1}{known}"
        )
    print(summary(rows))


if __name__ == "__main__":
    main()
