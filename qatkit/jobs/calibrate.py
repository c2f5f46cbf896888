"""The stages of a run that read calibration images: the calibration, and the algorithms before and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from qatkit.algorithms.base import CALIBRATED, OBSERVED, algorithms_of
from qatkit.algorithms.blocks.journal import working
from qatkit.calibration.candidates import METHODS
from qatkit.choose.ranges import Calibrated, calibrate_module, splits
from qatkit.choose.tournament import FINALISTS, SCORING_IMAGES
from qatkit.config.float_overrides import float_overrides
from qatkit.data import DataModule
from qatkit.jobs.stages import InCheckpoint, State
from qatkit.progress import shown
from qatkit.records.plan import Planned
from qatkit.records.run_files import PARTIAL, partial_results
from qatkit.run.allocator import return_freed_memory
from qatkit.run.build import example_batch
from qatkit.run.folder import Run, main_process
from qatkit.run.pace import Pace
from qatkit.run.plan import stage
from qatkit.run.timing import undisturbed
from qatkit.train.module import RAN

_SEARCHES = {
    "none": "",
    "layerwise": ", a percentile for each tensor",
    "tournament": ", tournament of methods",
}  # descriptions in the plan


class Calibrate(InCheckpoint):
    """Finds the activation ranges."""

    def run(self, state: State) -> State:
        run, data = state.run, state.data
        with run.stage("calibration", "calibrating"):
            example = example_batch(run.config, data.inputs)
            found = calibrate_module(state.prepared, data, run.config, example, folder=run.scratch)
        return self._with(state, found)

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        config = state.run.config.calibration
        method = config.observer.rpartition(".")[2].removesuffix("Observer")
        chosen = _SEARCHES[config.search]
        with undisturbed():  # the calibration itself warns of too few images
            count = config.images if config.random else sum(map(len, splits(state.data, state.run.config)))
        about = f"{count:,} {state.data.task.names.samples}, {method}{chosen}"
        if config.cache is not None and Path(config.cache).exists():
            return (stage("calibration", f"from {config.cache}", lambda: 0.0, done=self.done(state)),)
        return (stage("calibration", about, partial(_seconds, state, pace), done=self.done(state)),)

    def restore(self, state: State) -> State:
        assert state.stored is not None
        return self._with(state, Calibrated.from_dict(state.stored.get("calibrated", {})))

    def _with(self, state: State, found: Calibrated) -> State:
        state.prepared.about["calibrated"] = asdict(found)
        return replace(state, calibrated=found, run=_settled(state.run, found))


def _seconds(state: State, pace: Pace) -> float:
    """Returns the estimated seconds of a calibration.

    The pass over the samples is followed by the scoring of all methods if `calibration.search` is set, and in a
    tournament by the evaluation of the finalists' files.
    """
    config, found = state.run.config, pace.calibration
    observed, held_out = splits(state.data, config)
    seconds = len(observed) * (found.each + pace.load) + found.once
    if config.calibration.search != "none":
        scored = len(METHODS) * SCORING_IMAGES * pace.simulated
        finals = (FINALISTS + 2) * len(held_out) * (pace.file("int8") + pace.load)
        seconds += scored + (finals if config.calibration.search == "tournament" else 0.0)
    return seconds


def _settled(run: Run, found: Calibrated) -> Run:
    """Returns the run with overrides, so that later modules keep the operators float that this calibration did."""
    config = run.config
    overrides = {**config.backend.overrides, **float_overrides(found.floats)}
    cache = None if found.floats else config.calibration.cache  # it belongs to the previous module
    calibration = replace(config.calibration, mixed_scales="report", cache=cache)
    backend = replace(config.backend, overrides=overrides)
    return replace(
        run, config=replace(config, backend=backend, calibration=calibration), asked=run.asked or config
    )


class _Algorithms(InCheckpoint):
    """Runs the algorithms of one stage; does nothing with algorithm_choice=auto (`Compete` runs them)."""

    stage: str
    hook: str  # the module's method that is called with the images

    def run(self, state: State) -> State:
        if state.run.config.algorithm_choice == "all":
            _with_images(state.run, state.data, self.stage, getattr(state.prepared, self.hook))
        return state

    def planned(self, state: State, pace: Pace) -> Sequence[Planned]:
        config, samples = state.run.config, state.data.task.names.samples
        chosen = algorithms_of(config.algorithm) if config.algorithm_choice == "all" else {}
        return [
            stage(name, f"algorithm, {one.images:,} {samples}", "its passes vary", done=self.done(state))
            for name, one in chosen.items()
            if one.stage == self.stage
        ]

    def restore(self, state: State) -> State:
        assert state.stored is not None
        if state.run.config.algorithm_choice == "all":
            state.prepared.about[RAN] = state.stored.get(RAN, [])
        return state


class Adjust(_Algorithms):
    """Runs the algorithms that read activations before their ranges are found."""

    stage, hook = OBSERVED, "adjust"


class Correct(_Algorithms):
    """Runs the algorithms that come after calibration."""

    stage, hook = CALIBRATED, "correct"


def _with_images(run: Run, data: DataModule, stage: str, hook: Callable[..., None]) -> None:
    """Runs the algorithms of a stage, each on as many calibration images as it needs.

    Long algorithms keep partial results in the run's folder until a checkpoint contains the final ones
    (`forget_partial`).
    """
    for name, algorithm in algorithms_of(run.config.algorithm).items():
        if algorithm.stage != stage:
            continue
        indices = data.calibration_indices(algorithm.images, f"algorithm.{name}.images")
        if run.config.precision.search == "auto":  # without the images that judge the front
            held_out = set(splits(data, run.config)[1])
            indices = [index for index in indices if index not in held_out]
        batches, title = (
            data.image_batches(indices, run.config.calibration.batch_size),
            name.replace("_", " "),
        )
        progress, file = run.config.trainer.progress, run.folder / f"{name}{PARTIAL}"
        between = partial(return_freed_memory, cycles=False)
        with (
            run.stage(name, title),
            working(progress=progress, seed=run.config.seed, file=file, between=between),
        ):
            seen = shown(batches, title, progress)
            hook((images for images, _ in seen), [algorithm])


def forget_partial(run: Run) -> None:
    """Removes the partial results of algorithms; called once a checkpoint contains the final ones."""
    if main_process():
        for path in partial_results(run.folder):
            path.unlink(missing_ok=True)
