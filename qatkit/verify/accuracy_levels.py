"""Measures what a file with packed weights (MatMulNBits) gains and loses at accuracy level 4 instead of 0.

At level 4, ONNX Runtime rounds activations to 8 bits and uses integer kernels; at level 0, they stay float.

    speed       both files timed alternately, round by round
    cost        the main metric with labels, else the share of changed decisions, on calibration samples

Level 4 pays off if it is more than 2 % faster in nine tenths of the rounds and the cost is within a bound: the
metric may be worse by a share `_WORSE` of its value. Without labels, a share `_CHANGED` of the decisions may
change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qatkit.progress import Batches
from qatkit.tasks import Task
from qatkit.verify.accuracy import all_cores, file_predictor, in_parts
from qatkit.verify.fidelity import Distance, finite
from qatkit_verify.latency import run_times
from qatkit_verify.session import open_session

_WORSE, _CHANGED, _FASTER = 0.005, 0.01, 1.02


@dataclass(frozen=True)
class LevelFigures:
    """A comparison of a file at level 4 with itself at level 0.

    Attributes:
        samples: the number of calibration samples on which both are compared.
        ratio: the speed of level 4 relative to level 0, the median of the rounds.
        ratio_low: the 10th percentile of the rounds.
        changed: the share of the decisions that differ at level 4, 0..1.
        sqnr_db: the SQNR of the outputs in dB; None if they are equal.
        metric: the main metric at level 0, at level 4, and by how much the latter is worse; None without
            labels.
    """

    samples: int
    ratio: float
    ratio_low: float
    changed: float
    sqnr_db: float | None
    metric: tuple[float, float, float] | None

    @property
    def costs_little(self) -> bool:
        """Returns whether the cost of level 4 is within the bound."""
        if self.metric is None:
            return self.changed <= _CHANGED
        before, _, lost = self.metric
        return lost <= _WORSE * abs(before)

    @property
    def pays(self) -> bool:
        """Returns whether level 4 is over 2 % faster in nine tenths of rounds, at a cost within the bound."""
        return self.ratio_low > _FASTER and self.costs_little

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures and their bounds as plain values for JSON."""
        bounds = {"max_changed": _CHANGED} if self.metric is None else {"max_worse": _WORSE}
        return {**asdict(self), **bounds, "min_ratio_low": _FASTER}

    def text(self, task: Task) -> str:
        """Returns a text with the figures."""
        names = task.names
        cost = f"{names.decision} differs in {100 * self.changed:.2f} %"
        if self.metric is not None:
            before, now, _ = self.metric
            cost = (
                f"{names.main.name} {names.main.of(now).text} instead of {names.main.of(before).text}, {cost}"
            )
        near = "equal outputs" if self.sqnr_db is None else f"SQNR of the outputs {self.sqnr_db:.1f} dB"
        return (
            f"on {self.samples} calibration {names.samples} level 4 runs {self.ratio:.2f} times as fast as level 0"
            f" (10th percentile {self.ratio_low:.2f}); {cost} ({near})"
        )


def compare_levels(
    files: tuple[Path, Path],
    batches: Batches,
    timed: Sequence[int] | Mapping[str, Any],
    task: Task,
    *,
    labelled: bool,
    batch: int,
    threads: int,
    runs: int,
) -> LevelFigures:
    """Compares a file at level 0 with the same file at level 4.

    Args:
        files: the files at level 0 and at level 4.
        batches: calibration batches, (samples, labels).
        timed: the input for timing: the shape of a batch of noise, or arrays by input name.
        task: the task whose decisions and metric are compared.
        labelled: whether the labels are meaningful.
        batch, threads, runs: timing settings, as in `qatkit_verify.latency.latency`.

    Raises:
        ConfigError: an output is NaN or infinite.
    """
    sessions = [open_session(path, threads=all_cores()) for path in files]
    predictors = [in_parts(file_predictor(one, task)) for one in sessions]
    distance, meters = Distance(task), [task.meter(), task.meter()]
    for samples, targets in batches:
        found = [
            finite(path.name, predict(samples), distance.images)
            for path, predict in zip(files, predictors, strict=True)
        ]
        distance.add(found[0], found[1])
        for meter, outputs in zip(meters, found, strict=True) if labelled else ():
            meter.add(outputs, targets)
    near, main = distance.result(), task.names.main
    metric = None
    if labelled:
        before, now = (meter.result().score for meter in meters)
        metric = (before, now, main.lost(before, now))
    ratio, ratio_low = _speeds(files, timed, batch, threads, runs)
    return LevelFigures(distance.images, ratio, ratio_low, 1 - near.agreement, near.sqnr_db, metric)


def _speeds(
    files: tuple[Path, Path],
    timed: Sequence[int] | Mapping[str, Any],
    batch: int,
    threads: int,
    runs: int,
) -> tuple[float, float]:
    """Returns the median and the 10th percentile, over the rounds, of the speed of level 4 relative to level 0."""
    each = timed if isinstance(timed, Mapping) else timed[1:]
    times = run_times(
        dict(zip(("exact", "rounded"), files, strict=True)), each, batch=batch, threads=threads, runs=runs
    )
    low, middle = np.quantile(times["exact"] / times["rounded"], [0.1, 0.5])
    return float(middle), float(low)
