"""Measures the cost of verification, relative to passes of the float and the INT8 file in ONNX Runtime.

    uv run benchmarks/verification.py recipe=efficientnet_lite0_ptq data.root=DIR [--images 96] [--rounds 3]
        [--for 10000] [--threads 1]

The other arguments are those of train.py; the module is calibrated but not trained. Each round measures the following
in turns, in CPU time, which other work on the machine does not affect:

    passes      the float and the INT8 file in ONNX Runtime, each of which reads the images itself
    CHECK       a check of verify.checks, as in a run

A second measurement with few images separates the work that does not depend on their number, such as opening files. It
prints milliseconds per image, and the cost of verifying `--for` images as a multiple of the passes. In that cost,
parity and fidelity count at most verify.parity_images.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from qatkit import models, report
from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.export.converted_reference import ConvertedReference
from qatkit.graph.precomputed import settled_graph
from qatkit.records.results import Results
from qatkit.run.allocator import keep_freed_memory
from qatkit.run.build import data_of, qat_module
from qatkit.run.export import write_file, write_float_file
from qatkit.train.module import QATModule
from qatkit.verify.accuracy import in_parts, predictor
from qatkit.verify.checks.accuracy import AccuracyCheck, FilesAccuracyCheck
from qatkit.verify.checks.base import Check, Subject
from qatkit.verify.checks.fidelity import FidelityCheck
from qatkit.verify.checks.parity import ParityCheck
from qatkit_verify.session import open_session, run_images

CONF = Path(__file__).resolve().parent.parent / "conf"
FEW, CALIBRATION = 8, 32  # numbers of images
CHECKS: dict[str, type[Check]] = {
    "accuracy": AccuracyCheck,
    "accuracy, files only": FilesAccuracyCheck,
    "fidelity": FidelityCheck,
    "parity": ParityCheck,
}


def prepared(overrides: Sequence[str], folder: Path) -> tuple[Subject, DataModule, Config]:
    """Returns the subject of the checks (a calibrated module and its two files), the data and the configuration."""
    config = compose_config(CONF, [*overrides, "calibration=moving_average", "trainer=cpu", "data.workers=0"])
    data = data_of(config)
    model = models.build(config.model, data.num_classes)
    module = qat_module(config, model, data.inputs, QATModule)
    module.calibrate(images for images, _ in data.calibration_batches(CALIBRATION, CALIBRATION))
    module.eval().ready_to_convert()
    converted = module.convert().graph
    files = {name: folder / f"{name}.onnx" for name in ("float", "int8")}
    write_float_file(model, config, data.inputs, files["float"])
    write_file(converted, config, data.inputs, files["int8"])
    subject = Subject(
        folder=folder,
        files=files,
        batches=data.test_batches,
        timed=data.inputs.timed,
        settings=config.verify,
        options=module.backend.session_options,
        predictors={"simulated": predictor(settled_graph(module.graph))},
        reference=ConvertedReference(converted),
    )
    return subject, data, config


def on(subject: Subject, data: DataModule, images: int, threads: int) -> Subject:
    """Returns the subject with this number of images for every check, and this number of threads."""
    settings = replace(subject.settings, parity_images=images, threads=threads)
    batches = partial(data.test_subset, images, data.config.eval_batch_size)
    return replace(subject, batches=batches, settings=settings)


def passes(subject: Subject) -> None:
    """Runs both files over the images; each reads the images itself."""
    for path in subject.files.values():
        session = open_session(path, threads=subject.settings.threads, options=subject.options)
        run = in_parts(partial(run_images, session))
        for images, _ in subject.batches():
            run(images)


def checked(check: Check, subject: Subject) -> None:
    """Performs a check as in a run."""
    check.measure(subject, Results("benchmark", "", ""))


def measured(run: Callable[[Subject], object], subject: Subject) -> float:
    """Returns the CPU seconds of one call."""
    start = time.process_time()
    run(subject)
    return time.process_time() - start


def main() -> int:
    """Measures one recipe and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--for", dest="wanted", type=int, default=10_000, help="number of images to report the cost for"
    )
    parser.add_argument("--threads", type=int, default=1)
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    if hasattr(os, "sched_setaffinity"):  # the accuracy check uses all cores that the process may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    keep_freed_memory()  # as in a run
    runs: dict[str, Callable[[Subject], object]] = {"passes": passes}
    runs |= {name: partial(checked, check()) for name, check in CHECKS.items()}
    with tempfile.TemporaryDirectory() as folder:
        subject, data, config = prepared(overrides, Path(folder))
        many, few = (on(subject, data, count, args.threads) for count in (args.images, FEW))
        times = np.array(
            [
                [[measured(run, one) for one in (few, many)] for run in runs.values()]
                for _ in range(args.rounds)
            ]
        )
    each = (times[..., 1] - times[..., 0]) / (args.images - FEW)  # [rounds, runs], seconds per image
    opening = times[..., 0] - FEW * each
    parity = min(config.verify.parity_images, args.wanted)
    counts = np.array([args.wanted if "accuracy" in name or name == "passes" else parity for name in runs])
    whole = counts * each + opening
    names = list(runs)
    print(f"{'':24}ms per image [min-max]".ljust(56) + "opening s")
    for column, name in enumerate(names):
        span = f"{1000 * each[:, column].min():.1f}-{1000 * each[:, column].max():.1f}"
        middle, fixed = 1000 * np.median(each[:, column]), np.median(opening[:, column])
        print(f"{name:24}{middle:.1f} [{span}]".ljust(56) + f"{fixed:.2f}")
    total = sum(whole[:, names.index(name)] for name in ("accuracy", "fidelity", "parity"))
    ratio = total / whole[:, 0]
    print(
        f"{config.model.name}: verification of {args.wanted:,} images takes {np.median(total):.0f} s,"
        f" {np.median(ratio):.2f} [{ratio.min():.2f}-{ratio.max():.2f}] times as long as the passes"
    )
    print(f"{args.images} images, {args.rounds} rounds, CPU time, {args.threads} threads;", end=" ")
    print(report.this_hardware(args.threads).cpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
