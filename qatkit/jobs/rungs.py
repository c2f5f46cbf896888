"""The rungs of a climb. Each rung changes the configuration that the climb has kept so far.

    naive → whole operators → per-channel scales → tournament of ranges → the backend's placement
    → SmoothQuant → useful corrections → block reconstruction → mixed precision → QAT with distillation

The first rung is ONNX Runtime's quantize_static with its defaults, which quantizes the elementary operators
of a LayerNorm. The others are runs of qatkit. A new rung is a new entry of `RUNGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qatkit.config.float_overrides import float_overrides
from qatkit.config.schema import (
    AnalysisConfig,
    BackendConfig,
    CalibrationConfig,
    Config,
    ModelConfig,
    PrecisionConfig,
    RescueConfig,
    ScheduleConfig,
)
from qatkit_verify.placement.sites import read_float_sites

_PACKAGE = "qatkit.algorithms"
_CORRECTIONS = {
    "bias_correction": f"{_PACKAGE}.BiasCorrection",
    "moment_rounding": f"{_PACKAGE}.MomentRounding",
    "equalize": f"{_PACKAGE}.Equalize",
}
_OWN_RUNG = ("smooth_quant", "block_reconstruction")
# Algorithms that run after calibration. Rungs that train weights or learn rounding start without them.
_OF_RANGES = ("bias_correction", "moment_rounding", "block_reconstruction")
# Schedules for transformers and for CNNs, with a hundredth of their learning rates in training
# (conf/schedule).
_ADAMW = ScheduleConfig(optimizer="adamw", lr=1e-5, weight_decay=0.01, warmup=0.1)
_SGD = ScheduleConfig(optimizer="sgd", lr=1e-4)
# Rungs are compared by these checks. The delivered one is verified with the user's configuration.
_CHECKS = [
    "qatkit.verify.checks.latency.LatencyCheck",
    "qatkit.verify.checks.accuracy.FilesAccuracyCheck",
    "qatkit.verify.checks.fidelity.FidelityCheck",
    "qatkit.verify.checks.size.SizeCheck",
]
_COMPARED = 1000  # number of images whose outputs distinguish rungs if the metric does not


@dataclass(frozen=True)
class RungInputs:
    """The inputs of the rungs.

    Attributes:
        config: the user's configuration.
        normalizes: whether the model has LayerNorms, GroupNorms or RMSNorms, as transformers do.
    """

    config: Config
    normalizes: bool


@dataclass(frozen=True)
class Rung:
    """A rung of the climb.

    Attributes:
        name: the name of the rung and of its folder.
        title: its method in a few words.
        about: a longer description.
        change: a function from the inputs and the configuration kept so far to the configuration of the rung.
        always: whether later rungs build on it whatever its result, since it leads to the user's configuration.
        ends: whether the climb may end with it. It may not if every operator is quantized: kernels that
            multiply two activations are not simulated exactly, only to within a step, so the file would miss
            the parity bound.
    """

    name: str
    title: str
    about: str
    change: Callable[[RungInputs, Config], Config]
    always: bool = False
    ends: bool = True


def naive(config: Config, float_file: str) -> Config:
    """Returns the configuration of ONNX Runtime's quantize_static with its defaults, for a float file.

    Every operator is quantized, with per-tensor scales and min-max ranges.
    """
    backend = BackendConfig(config.backend.target, weight_granularity="per_tensor", every_operator=True)
    return replace(
        _plain(config),
        onnx=float_file,
        mode="static",
        model=ModelConfig(),
        backend=backend,
        calibration=_minmax(config.calibration),
    )


def _whole(asked: RungInputs, kept: Config) -> Config:
    backend = replace(asked.config.backend, weight_granularity="per_tensor", every_operator=True)
    return replace(_plain(asked.config), backend=backend, calibration=_minmax(asked.config.calibration))


def _per_channel(asked: RungInputs, kept: Config) -> Config:
    return replace(
        kept, backend=replace(kept.backend, weight_granularity=asked.config.backend.weight_granularity)
    )


def _tournament(asked: RungInputs, kept: Config) -> Config:
    observer = "qatkit.quant.observers.MSEObserver"
    return replace(kept, calibration=replace(kept.calibration, observer=observer, search="tournament"))


def _places(asked: RungInputs, kept: Config) -> Config:
    return replace(kept, backend=asked.config.backend)


def _smooth(asked: RungInputs, kept: Config) -> Config:
    return replace(kept, algorithm=_named(asked, {"smooth_quant": f"{_PACKAGE}.SmoothQuant"}))


def _corrections(asked: RungInputs, kept: Config) -> Config:
    own = {name: entry for name, entry in asked.config.algorithm.items() if name not in _OWN_RUNG}
    offered = {**_named(asked, _CORRECTIONS), **own, **kept.algorithm}
    return replace(kept, algorithm=offered, algorithm_choice="auto")


def _blocks(asked: RungInputs, kept: Config) -> Config:
    learned = _named(asked, {"block_reconstruction": f"{_PACKAGE}.BlockReconstruction"})
    return replace(kept, algorithm={**_before_ranges(kept.algorithm), **learned}, algorithm_choice="all")


def _mixed(asked: RungInputs, kept: Config) -> Config:
    return replace(kept, precision=replace(asked.config.precision, search="auto", front=None, point=None))


def _qat(asked: RungInputs, kept: Config) -> Config:
    """Returns the configuration of QAT that distills the outputs of the float model.

    The user's schedule applies if it trains, else `rescue.epochs` epochs at a low learning rate.
    """
    own = asked.config.schedule
    trains = own.epochs > 0
    schedule = (
        own if trains else replace(_ADAMW if asked.normalizes else _SGD, epochs=asked.config.rescue.epochs)
    )
    schedule = replace(schedule, distill=schedule.distill or 1.0, float_epochs=0)
    # Rescaled channels would change the relative step size of SGD, which depends on a weight's scale. Adam's
    # does not.
    kept_below = _before_ranges(kept.algorithm) if schedule.optimizer == "adamw" else {}
    verify = replace(kept.verify, every=asked.config.verify.every)
    return replace(kept, algorithm=kept_below, algorithm_choice="all", schedule=schedule, verify=verify)


NAIVE = (
    "naive",
    "quantize_static with its defaults",
    "every ONNX operator, per-tensor scales, min-max ranges",
)
RUNGS = (
    Rung("whole_operators", "whole operators", "LayerNorm, Softmax and GELU as one operator each", _whole,
         always=True, ends=False),
    Rung("per_channel", "per-channel scales", "one weight scale per output channel", _per_channel,
         always=True, ends=False),
    Rung("calibration", "tournament of ranges", "compared as files, on held-out samples", _tournament,
         always=True, ends=False),
    Rung("placement", "the backend's placement", "LayerNorm, Softmax, GELU and residual sums in float", _places,
         always=True),
    Rung("smooth_quant", "SmoothQuant", "outlier channels of activations move into the weights after them", _smooth),
    Rung("corrections", "corrections compete", "of biases, roundings and channels; useful ones are kept", _corrections),
    Rung("block_reconstruction", "block reconstruction", "roundings are learned block by block", _blocks),
    Rung("mixed_precision", "mixed precision", "operators with the largest loss for their time stay float", _mixed),
    Rung("qat", "fine-tuning", "QAT with the outputs of float as its target", _qat),
)  # fmt: skip


def with_choices_of(config: Config, report: Mapping[str, Any]) -> Config:
    """Returns a rung's configuration with its choices from report.json made explicit, for the rungs after it."""
    if config.algorithm_choice == "auto":
        chosen = {row["name"] for row in report["algorithms"] if row["kept"]}
        kept = {name: entry for name, entry in config.algorithm.items() if name in chosen}
        config = replace(config, algorithm=kept, algorithm_choice="all")
    if config.precision.search == "auto":
        floats = next(point["floats"] for point in report["precision"]["points"] if point["chosen"]) or ()
        overrides = {**config.backend.overrides, **float_overrides(read_float_sites(floats))}
        backend = replace(config.backend, overrides=overrides)
        config = replace(config, backend=backend, precision=PrecisionConfig())
    return config


def handed_over(asked: Config, rung: Config) -> Config:
    """Returns the configuration of the run that verifies the chosen rung with the user's checks and analyses.

    The run has no float control.
    """
    verify = replace(asked.verify, control=False, every=rung.verify.every)
    return replace(rung, verify=verify, analysis=asked.analysis)


def _plain(config: Config) -> Config:
    """Returns a configuration that only calibrates: no algorithms, training, searches, or bounds that end a rung."""
    return replace(
        config,
        algorithm={},
        algorithm_choice="all",
        schedule=replace(
            config.schedule,
            epochs=0,
            float_epochs=0,
            distill=0.0,
            distill_teacher=None,
            distill_checkpoint=None,
            distill_features=[],
        ),
        verify=replace(
            config.verify,
            checks=list(_CHECKS),
            audit=False,
            control=False,
            every=None,
            min_agreement=None,
            target_isa=None,
            parity_images=min(_COMPARED, config.verify.parity_images),
        ),
        analysis=AnalysisConfig(),
        precision=PrecisionConfig(),
        rescue=RescueConfig(),
        resume=None,
    )


def _minmax(calibration: CalibrationConfig) -> CalibrationConfig:
    observer = "qatkit.quant.observers.MinMaxObserver"
    return replace(
        calibration,
        observer=observer,
        percentile=None,
        deviations=None,
        search="none",
        cache=None,
        random=False,
    )


def _named(asked: RungInputs, offered: Mapping[str, str]) -> dict[str, Any]:
    """Returns the offered algorithms, with the user's settings if there are any, else with their defaults."""
    own = asked.config.algorithm
    return {name: own.get(name, {"target": target}) for name, target in offered.items()}


def _before_ranges(algorithms: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in algorithms.items() if name not in _OF_RANGES}
