"""How good one model is on images that no model was made with, and how much of a difference between two is chance.

    Verdict          a model, image by image, so that two are compared by pairs
    why_not          why a trial does not pay beside what is kept: fewer images right, or no gain beyond noise
    meets, keeps     whether a target is met: with standard errors to spare, or by the figures alone
    standard_error   of a share; `chance`, of a difference of top-1

What is left to chance is two standard errors (`SURE`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qatkit.config.schema import TargetConfig
from qatkit.train.module import NOTHING

SURE = 2.0  # standard errors that a difference has to exceed


@dataclass(frozen=True)
class Verdict:
    """One model on the judge's images.

    Attributes:
        right: [N], whether the label is the largest logit; None without labels.
        same: [N], whether the largest logit is float's.
        errors: [N], mean squared difference of the logits from float's, relative to the size of float's over all
            images; all NaN where float's logits are equal.
    """

    right: NDArray[np.bool_] | None
    same: NDArray[np.bool_]
    errors: NDArray[np.float64]

    @property
    def top1(self) -> float | None:
        """Percent."""
        return None if self.right is None else 100 * float(self.right.mean())

    @property
    def agreement(self) -> float:
        """Share of the images with float's top-1."""
        return float(self.same.mean())

    @property
    def error(self) -> float | None:
        """Mean of the relative squared errors."""
        error = float(self.errors.mean())
        return None if math.isnan(error) else error

    @property
    def sqnr_db(self) -> float | None:
        """Signal to noise of the logits, in decibels; None of equal ones, and where there is no error to speak of."""
        return -10 * math.log10(self.error) if self.error else None


def standard_error(share: float, images: int) -> float:
    """Returns the standard error of a share that was counted on so many images."""
    return math.sqrt(share * (1 - share) / images)


def chance(differing: float, images: int) -> float:
    """Returns the standard error of a difference of top-1, in points.

    Args:
        differing: images that exactly one of the two models judges rightly; one is added, since none proves nothing.
        images: that both were judged on.
    """
    return 100 * math.sqrt(differing + 1) / max(1, images)


def why_not(trial: Verdict, kept: Verdict) -> str:
    """Says why `trial` does not take the place of `kept`; "" if it pays.

    It pays if it judges no fewer images rightly, beyond noise, and the errors of its logits are smaller beyond noise,
    in the mean of the differences image by image.
    """
    if trial.right is not None and kept.right is not None:
        lost, won = int((kept.right & ~trial.right).sum()), int((trial.right & ~kept.right).sum())
        if lost - won > SURE * math.sqrt(lost + won):
            return f"loses {lost - won} images"
    if np.array_equal(trial.errors, kept.errors):
        return NOTHING
    gain = kept.errors - trial.errors
    if not np.isfinite(gain).all():
        return "its outputs are not finite" if np.isfinite(kept.errors).all() else "nothing to compare with"
    noise = float(gain.std(ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    if gain.mean() > SURE * noise:
        return ""
    return "worse" if gain.mean() < -SURE * noise else "no difference beyond noise"


def meets(verdict: Verdict, exact: Verdict, target: TargetConfig, sure: float) -> bool:
    """Whether the target is met, with so many standard errors to spare.

    Args:
        exact: the verdict on the float model.
    """
    count = len(verdict.same)
    if exact.right is None or exact.top1 is None or verdict.right is None or verdict.top1 is None:
        missing = 1 - verdict.agreement
        noise = math.sqrt(missing * (1 - missing) / count + 1 / count**2)
        return missing + sure * noise <= 1 - target.min_agreement
    differing = int((exact.right != verdict.right).sum())
    return exact.top1 - verdict.top1 + sure * chance(differing, count) <= target.max_drop


def keeps(target: TargetConfig, drop: float | None, agreement: float, slack: float = 0.0) -> bool:
    """Whether figures keep a target.

    Args:
        drop: points of top-1 below float's; None without labels, where the agreement is asked.
        agreement: share of the images with float's top-1.
        slack: points that subtraction may have added to the drop.
    """
    if drop is None:
        return agreement >= target.min_agreement
    return drop <= target.max_drop + slack
