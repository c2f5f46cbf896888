"""The groups `target`, `precision`, `rescue` and `search`: targets for the file, and the searches that reach them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import COUNT, FRACTION, PLACE, POSITIVE, Choices, Range, setting


@dataclass
class TargetConfig:
    """The targets of automatic choices: algorithm_choice=auto, mixed precision and the rescue."""

    max_drop: float = setting(
        0.1,
        "maximum loss against float, in points (or the unit of the task's main metric); at least 0, "
        "since float itself would miss a lower target",
        Range(0, 100),
    )
    min_agreement: float = setting(
        0.99, "minimum share of unlabelled samples with the same decision as float", FRACTION
    )
    min_sqnr: float | None = setting(
        None,
        "minimum signal-to-quantization-noise ratio of the outputs in dB, on unlabelled samples; the "
        "higher of this and verify.min_float_sqnr applies; null: only verify.min_float_sqnr",
        Range(-100, 200),
    )
    min_speedup: float | None = setting(
        None,
        "minimum of float latency / the file's latency, for precision=auto: the most accurate file "
        "that reaches it is chosen; null: the fastest file that meets the accuracy target",
        POSITIVE,
    )


@dataclass
class PrecisionConfig:
    """The choice of the operators that stay float, to reach the accuracy or the speed-up of `target`."""

    search: str = setting(
        "none",
        "auto: write, judge and time files with some operators in float, then continue with the "
        "fastest that meets the accuracy target, or with the one that target.min_speedup selects; "
        "none: no search",
        Choices(("none", "auto")),
    )
    points: int = setting(8, "maximum number of mixed-precision files that are written and measured", COUNT)
    images: int = setting(256, "calibration samples on which the loss of each operator is estimated", COUNT)
    front: str | None = setting(
        None,
        "folder of a finished run with precision=auto; the point precision.point of its Pareto front "
        "is built; null: none",
        PLACE,
    )
    point: int | None = setting(
        None, "index of the point of precision.front that is built; null: none", Range(0)
    )


@dataclass
class RescueConfig:
    """The rescue: increasingly strong methods (rungs), tried in order until the accuracy target is met."""

    climb: bool = setting(
        False,
        "try methods one after another, from naive PTQ to fine-tuning (the rungs), until the accuracy "
        "target is met; false: one run with the other settings",
    )
    full: bool = setting(False, "try all rungs, even after the target is met")
    epochs: int = setting(1, "epochs of the last rung (fine-tuning) if schedule.epochs is 0", COUNT)


@dataclass
class SearchConfig:
    """A study of many runs with settings that Optuna proposes; all workers of a command share the study."""

    trials: int = setting(
        0, "total number of runs, all different, over all workers; 0: no search", Range(0, 100_000)
    )
    space: dict[str, Any] = setting(
        dict,
        "KEY: [VALUE, ...] for a choice; KEY: {low: NUMBER, high: NUMBER, step: NUMBER, log: true} for "
        "a number (step and log may be left out), which is an integer if the key's values are; a key "
        "is anything the command line accepts, including groups",
    )
    objectives: list[str] = setting(
        lambda: ["accuracy"],
        "figures of the file in ONNX Runtime to optimize, one or several: accuracy (the task's main "
        "metric), drop (its loss against float), agreement (share of decisions as in float), sqnr, "
        "latency, speedup, size",
    )
    constraints: list[str] = setting(
        list, "bounds on these figures, in points, dB, ms and MB: [accuracy>=97, size<=3.5]"
    )
    storage: str | None = setting(
        None,
        "where the study is stored. null: SQLite in the study's folder; journal: a file in that "
        "folder, for workers on several machines; or a database URL (postgresql://...)",
    )
    prune: bool = setting(
        True,
        "end a trial early if its best accuracy so far is below the median of the finished trials at "
        "that point; has no effect if neither accuracy nor drop is an objective or a constraint",
    )
    startup: int = setting(
        8, "number of random trials at the start; no trial ends early before this many are finished", Range(0)
    )
    attempts: int = setting(
        5,
        "how often a trial is tried if its worker is killed, before it counts as failed (an attempt "
        "that a handled signal ends does not count)",
        COUNT,
    )
    worker: int = setting(
        0, "number of this worker: -m launcher=slurm search.worker=0,1,2,3 starts four", Range(0)
    )
