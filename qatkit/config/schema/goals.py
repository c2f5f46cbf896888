"""What the file has to come to, and who looks for one that does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import COUNT, FRACTION, PLACE, POSITIVE, Choices, Range, setting


@dataclass
class TargetConfig:
    """What is aimed at where there is a choice: algorithms compete, a precision is taken, a rescue climbs."""

    max_drop: float = setting(
        0.1,
        "points (or the unit of the task's main metric) below float, which itself would miss less than 0",
        Range(0, 100),
    )
    min_agreement: float = setting(
        0.99, "of images without labels: share with the same decision as float", FRACTION
    )
    min_sqnr: float | None = setting(
        None,
        "of images without labels: dB, float's outputs over the error, where that is more than verify.min_float_sqnr",
        Range(-100, 200),
    )
    min_speedup: float | None = setting(
        None,
        "float latency / this file's, of precision=auto: the most accurate point that is so fast is taken, in place of "
        "the fastest one that meets the accuracy target",
        POSITIVE,
    )


@dataclass
class PrecisionConfig:
    """Which operators are float in the file, for the accuracy that `target` asks for or the speed."""

    search: str = setting(
        "none",
        "auto: files with some operators in float are made, judged and timed, and the run goes on with the one that "
        "target asks for",
        Choices(("none", "auto")),
    )
    points: int = setting(8, "files of mixed precision that are made and measured, at most", COUNT)
    images: int = setting(256, "of calibration, on which what each operator loses is estimated", COUNT)
    front: str | None = setting(
        None, "folder of a run that has searched; with point, that point is built", PLACE
    )
    point: int | None = setting(None, "number of a point of that front", Range(0))


@dataclass
class RescueConfig:
    """The ladder back to float's accuracy, rung by rung, until the target is met."""

    climb: bool = setting(False, "naive PTQ first, then one thing better on each rung (qatkit.jobs.rungs)")
    full: bool = setting(False, "all rungs, whatever is met on the way")
    epochs: int = setting(1, "of the last rung, where the schedule trains nothing by itself", COUNT)


@dataclass
class SearchConfig:
    """A study of many runs, whose settings Optuna proposes; all workers of one command share it."""

    trials: int = setting(0, "runs in all, no two alike, whoever runs them; 0: no search", Range(0, 100_000))
    space: dict[str, Any] = setting(
        dict,
        "KEY: [VALUE, ...], one of these, or KEY: {low: , high: , step: , log: true}, a number, whole where the key's "
        "are; a key is whatever the command line takes, groups included",
    )
    objectives: list[str] = setting(
        lambda: ["accuracy"],
        "of the file in ONNX Runtime, one or several: accuracy, drop, agreement, sqnr, latency, speedup, size",
    )
    constraints: list[str] = setting(
        list, "bounds on such figures, in points, ms and MB: [accuracy>=97, size<=3.5]"
    )
    storage: str | None = setting(
        None,
        "of the study. null: SQLite in its folder; journal: a file there, for workers on several machines; or a "
        "database's URL (postgresql://...)",
    )
    prune: bool = setting(
        True,
        "end a trial whose best accuracy so far is below the median of what the finished ones had by then; where "
        "neither accuracy nor drop is an objective or a constraint, none",
    )
    startup: int = setting(
        8, "trials that are drawn at random, and that are finished before any ends early", Range(0)
    )
    attempts: int = setting(
        5,
        "of a trial whose worker was killed, before it counts as failed (one that a signal ended is none)",
        COUNT,
    )
    worker: int = setting(
        0, "of this worker a number: -m launcher=slurm search.worker=0,1,2,3 starts four", Range(0)
    )
