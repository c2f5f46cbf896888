"""The quality of one model on held-out images, and the part of a difference between two models that is chance.

    Verdict          the results per image, so that two models can be compared image by image
    why_not          why a trial is not kept: a worse metric, or no gain beyond noise
    aim              the target of a run
    meets, keeps     whether a target is met: beyond noise, or by the figures only
    chance           the standard error of a difference in a metric that counts images

Differences up to two standard errors (`SURE`) count as chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit.config.schema import Config, TargetConfig
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.train.module import NOTHING

SURE = 2.0  # number of standard errors that a difference has to exceed


@dataclass(frozen=True)
class Verdict:
    """The results of one model on the judge's images.

    Attributes:
        values: the contribution of each image to the task's main metric, [N]; None without labels.
        same: whether the decision for each image equals float's, [N].
        errors: the mean squared difference between the outputs and float's for each image, [N], relative to
            the mean square of float's over all images; all NaN if that is not defined.
        task: the task, which defines the metric.
    """

    values: NDArray[Any] | None
    same: NDArray[np.bool_]
    errors: NDArray[np.float64]
    task: Task = CLASSIFICATION

    @property
    def score(self) -> float | None:
        """The main metric; None without labels."""
        return None if self.values is None else self.task.mean(self.values)

    @property
    def agreement(self) -> float:
        """The share of images whose decision equals float's, from 0 to 1."""
        return float(self.same.mean())

    @property
    def error(self) -> float | None:
        """The mean of the relative squared errors; None if it is undefined."""
        error = float(self.errors.mean())
        return None if math.isnan(error) else error

    @property
    def sqnr_db(self) -> float | None:
        """The signal-to-noise ratio of the outputs in decibels; None if it is infinite or undefined."""
        return -10 * math.log10(self.error) if self.error else None


def chance(differing: float, images: int) -> float:
    """Returns the standard error of a difference in a metric that counts images, in points.

    Args:
        differing: the number of images that exactly one of the two models classifies correctly. One is added,
            since a count of zero does not prove that there is no difference.
        images: the number of images on which both were judged.
    """
    return 100 * math.sqrt(differing + 1) / max(1, images)


def why_not(trial: Verdict, kept: Verdict) -> str:
    """Returns the reason why `trial` does not replace `kept`; "" if it does.

    It does if its metric is not worse beyond noise, and the mean error of its outputs, compared image by image, is
    smaller beyond noise.
    """
    if trial.values is not None and kept.values is not None:
        worse = trial.task.worse(kept.values, trial.values, SURE)
        if worse:
            return worse
    if np.array_equal(trial.errors, kept.errors):
        return NOTHING
    gain = kept.errors - trial.errors
    if not np.isfinite(gain).all():
        return "its outputs are not finite" if np.isfinite(kept.errors).all() else "nothing to compare with"
    noise = float(gain.std(ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    if gain.mean() > SURE * noise:
        return ""
    return "worse" if gain.mean() < -SURE * noise else "no difference beyond noise"


def aim(config: Config, *, labelled: bool) -> TargetConfig:
    """Returns the target of a run.

    With labels, its minimum SQNR is left out. Without labels it is at least as strict as the bounds of
    `verify`.
    """
    target, bounds = config.target, config.verify
    if labelled:
        return replace(target, min_sqnr=None)
    agreement = max(target.min_agreement, bounds.min_float_agreement or 0.0)
    decibels = [one for one in (target.min_sqnr, bounds.min_float_sqnr) if one is not None]
    return replace(target, min_agreement=agreement, min_sqnr=max(decibels, default=None))


def meets(verdict: Verdict, exact: Verdict, target: TargetConfig, sure: float) -> bool:
    """Returns whether the target is met with a margin of `sure` standard errors; a minimum SQNR has no margin.

    Args:
        verdict: the verdict on the model.
        exact: the verdict on the float model.
        target: the target.
        sure: the margin in standard errors; a negative one also accepts a target that is missed within noise.
    """
    if not _near(target, verdict.sqnr_db):
        return False
    count = len(verdict.same)
    if exact.values is None or exact.score is None or verdict.values is None or verdict.score is None:
        missing = 1 - verdict.agreement
        noise = math.sqrt(missing * (1 - missing) / count + 1 / count**2)
        return missing + sure * noise <= 1 - target.min_agreement
    lost = exact.task.names.main.lost(exact.score, verdict.score)
    return lost + sure * exact.task.noise(exact.values, verdict.values) <= target.max_drop


def keeps(
    target: TargetConfig, drop: float | None, agreement: float, sqnr_db: float | None, slack: float = 0.0
) -> bool:
    """Returns whether figures meet a target.

    Args:
        target: the target.
        drop: the loss of the main metric compared with float's; None without labels, where the agreement
            counts.
        agreement: the share of images whose decision equals float's.
        sqnr_db: the signal-to-noise ratio between the outputs and float's in dB; None if they are equal.
        slack: the points that a subtraction may have added to the drop.
    """
    if not _near(target, sqnr_db):
        return False
    if drop is None:
        return agreement >= target.min_agreement
    return drop <= target.max_drop + slack


def _near(target: TargetConfig, sqnr_db: float | None) -> bool:
    return target.min_sqnr is None or sqnr_db is None or sqnr_db >= target.min_sqnr
