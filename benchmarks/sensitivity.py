"""Measures the cost and accuracy of the sensitivity analysis, against plain runs of the whole graph.

    uv run benchmarks/sensitivity.py recipe=resnet18_cifar10_ptq data.root=DIR model.checkpoint=FILE
        [--images 1000] [--batch 50] [--threads 1] [--sites N] [--directions only "all but"]

The other arguments are those of train.py. Ranges are those of the recipe with calibration=moving_average. It prints

    evaluation   CPU seconds of one run over all images with one site quantized, or all but one; mean over a few sites.
                 A site is a weight or activation with its quantizer.
    ratio        seconds of the exact analysis / (rows x evaluation); a row is one site in one direction
    estimate     seconds of the estimate / evaluation, and the rank correlation (Spearman) between its ranking and the
                 exact rankings by loss and by SQNR
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, fx

from qatkit import models
from qatkit.analysis.estimate import estimate
from qatkit.analysis.sensitivity import DIRECTIONS, ranked, sensitivity
from qatkit.analysis.switches import Switch, switches, turn_all
from qatkit.config.compose import compose_config
from qatkit.graph.phase import inference
from qatkit.records.analysis import ONLY, SensitivityRow
from qatkit.run.allocator import keep_freed_memory
from qatkit.run.build import data_of, qat_module
from qatkit.train.module import QATModule

CONF = Path(__file__).resolve().parent.parent / "conf"
_TRIED = 3  # number of sites for which plain runs are timed

Batch = tuple[Tensor, Tensor]


def prepared(overrides: Sequence[str], images: int, batch: int) -> tuple[fx.GraphModule, list[Batch]]:
    """Returns the calibrated graph of a recipe, and batches of test images."""
    config = compose_config(CONF, [*overrides, "calibration=moving_average", "trainer=cpu"])
    data = data_of(config)
    module = qat_module(config, models.build(config.model, data.num_classes), data.inputs, QATModule)
    calibration = data.calibration_batches(256, 32)
    module.calibrate(images for images, _ in calibration)
    module.eval().ready_to_convert()
    return module.graph, list(data.test_subset(images, batch))


def seconds(run: Callable[[], object]) -> float:
    """Returns the CPU time of one call, which other work on the machine does not affect."""
    start = time.process_time()
    run()
    return time.process_time() - start


def by_hand(
    graph: fx.GraphModule, batches: Sequence[Batch], every: Sequence[Switch], one: Switch, on: bool
) -> None:
    """Runs the whole graph with one site quantized and the others in float (`on`), or the reverse."""
    with inference(graph):
        turn_all(every, not on)
        one.turn(on)
        for images, _ in batches:
            graph(images)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the rank correlation of two series; ties, which measured figures hardly have, get different ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.asarray(np.corrcoef(np.stack(ranks)))[0, 1])


def compare(estimated: Sequence[SensitivityRow], exact: Sequence[SensitivityRow]) -> str:
    """Returns the rank correlations of the estimate with the exact loss and the exact SQNR, as text."""
    loss = {(r.site, r.kind): r.loss for r in estimated}
    rows = ranked(exact)
    found = [loss[r.site, r.kind] for r in rows]
    noise = [-(r.sqnr if r.sqnr is not None else 300.0) for r in rows]
    by_loss, by_sqnr = (spearman(found, other) for other in ([r.loss for r in rows], noise))
    return f"Spearman {by_loss:.3f} to the exact loss, {by_sqnr:.3f} to the exact SQNR"


def main() -> None:
    """Measures one recipe and prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sites", type=int, help="number of sites, spread evenly (default: all)")
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS))
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as in a run
    graph, batches = prepared(overrides, args.images, args.batch)
    every = switches(graph)
    step = 1 if args.sites is None else max(1, len(every) // args.sites)
    at = every[::step]
    tried = [every[i * (len(every) - 1) // (_TRIED - 1)] for i in range(_TRIED)]
    by_hand(graph, batches[:1], every, tried[0], True)
    once = [
        seconds(partial(by_hand, graph, batches, every, site, direction == ONLY))
        for direction in args.directions
        for site in tried
    ]
    evaluation = sum(once) / len(once)
    print(
        f"{len(every)} sites, {sum(len(y) for _, y in batches)} images; evaluation {evaluation:.2f} s",
        flush=True,
    )
    found: list[SensitivityRow] = []
    took = seconds(lambda: found.extend(estimate(graph, batches)))
    print(f"estimate: {took:.1f} s, {took / evaluation:.2f} evaluations", flush=True)
    exact: list[SensitivityRow] = []
    took = seconds(lambda: exact.extend(sensitivity(graph, batches, at=at, directions=args.directions)))
    rows = len(at) * len(args.directions)
    print(f"exact: {rows} rows in {took:.1f} s, ratio {took / (rows * evaluation):.3f}", flush=True)
    print(compare(found, exact))
    for direction in args.directions:
        print(f"most sensitive, {direction}:")
        for row in ranked(exact, direction=direction)[:8]:
            loss = next(r.loss for r in found if (r.site, r.kind) == (row.site, row.kind))
            sqnr = "equal" if row.sqnr is None else f"{row.sqnr:.1f} dB"
            print(f"  {row.kind} {row.site}: top-1 {row.score}, loss {row.loss:.3e} ({loss:.3e}), {sqnr}")


if __name__ == "__main__":
    main()
