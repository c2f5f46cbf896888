"""The stages of a run that look at calibration images: the algorithms before and after the ranges, and the ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from qatkit.algorithms.base import CALIBRATED, OBSERVED, algorithms_of
from qatkit.algorithms.blocks.journal import working
from qatkit.choose.ranges import Calibrated, calibrate_module, splits
from qatkit.data import DataModule
from qatkit.progress import shown
from qatkit.records.run_files import CHECKPOINT_FILE, PARTIAL, partial_results
from qatkit.run.build import example_batch
from qatkit.run.folder import Run, main_process, read_checkpoint
from qatkit.train.module import IDLE, QATModule


def calibrate(run: Run, module: QATModule, data: DataModule) -> Calibrated:
    """The stage: ranges, or what is known of them where a checkpoint holds them already."""
    path = run.folder / CHECKPOINT_FILE
    if path.is_file():  # the ranges are in the checkpoint
        found = Calibrated.from_dict(read_checkpoint(str(path), "resume")["qatkit"].get("calibrated", {}))
    else:
        with run.stage("calibration", "calibrating"):
            example = example_batch(run.config, data.input_shape)
            found = calibrate_module(module, data, run.config, example, folder=run.scratch)
    module.about["calibrated"] = asdict(found)
    return found


def adjust(run: Run, module: QATModule, data: DataModule) -> None:
    """The algorithms that look at activations before their ranges are found."""
    _with_images(run, module, data, OBSERVED, module.adjust)


def correct(run: Run, module: QATModule, data: DataModule) -> None:
    """The algorithms that come after calibration."""
    _with_images(run, module, data, CALIBRATED, module.correct)


def _with_images(
    run: Run, module: QATModule, data: DataModule, stage: str, hook: Callable[..., None]
) -> None:
    """The algorithms of a stage, each on as many of the calibration images as it wants.

    What those that take long have finished stays in the run's folder until a checkpoint holds it (`forget_partial`).
    """
    path = run.folder / CHECKPOINT_FILE
    if path.is_file():  # what they changed is in the checkpoint
        module.about[IDLE] = read_checkpoint(str(path), "resume")["qatkit"].get(IDLE, [])
        return
    for name, algorithm in algorithms_of(run.config.algorithm).items():
        if algorithm.stage != stage:
            continue
        indices = data.calibration_indices(algorithm.images, f"algorithm.{name}.images")
        if run.config.precision.search == "auto":  # what judges the front is not to be learned from
            held_out = set(splits(data, run.config)[1])
            indices = [index for index in indices if index not in held_out]
        batches, title = (
            data.image_batches(indices, run.config.calibration.batch_size),
            name.replace("_", " "),
        )
        progress, file = run.config.trainer.progress, run.folder / f"{name}{PARTIAL}"
        with run.stage(name, title), working(progress=progress, seed=run.config.seed, file=file):
            seen = shown(batches, title, progress)
            hook((images for images, _ in seen), [algorithm])


def forget_partial(run: Run) -> None:
    """Once a checkpoint holds what the algorithms came to: removes what they kept on the way."""
    if main_process():
        for path in partial_results(run.folder):
            path.unlink(missing_ok=True)
