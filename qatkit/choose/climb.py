"""The rule of a climb, based on the reports of finished runs: figures, without the images behind them.

    rung_why_not     why later rungs do not build on a rung: by the metric beyond chance, else by the outputs
    meets_target     whether a rung meets the target

Each rung is an entrant of one contest (`qatkit.jobs.rescue`), whose judge is the run itself.
"""

from __future__ import annotations

import math

from qatkit.choose.verdict import SURE, chance, keeps
from qatkit.config.schema import TargetConfig
from qatkit.records.ladder import RungResult
from qatkit_verify.classification import NAMES
from qatkit_verify.records import Metric

_DIGITS = 6  # digits of a drop in points; further ones come from subtraction


def meets_target(rung: RungResult, target: TargetConfig) -> bool:
    """Returns whether a file meets the target: in the main metric, or without labels in agreement with float."""
    drop = None if rung.drop is None else round(rung.drop, _DIGITS)
    return rung.measured and keeps(target, drop, rung.agreement or 0.0, rung.sqnr_db)


def rung_why_not(rung: RungResult, best: RungResult, metric: Metric = NAMES.main) -> str:
    """Says why later rungs don't build on `rung` but on `best`; "" if they do.

    A metric in percent decides where the difference exceeds chance, given the images that the two could judge
    differently. Otherwise the distance of the outputs to float's decides. The chance in other metrics is
    unknown.
    """
    if rung.score is not None and best.score is not None and metric.unit == "%":
        differing = (2 - (rung.agreement or 0.0) - (best.agreement or 0.0)) * rung.images
        lost = metric.lost(best.score, rung.score)
        if abs(lost) > SURE * chance(differing, rung.images):
            return "" if lost < 0 else f"loses {lost:.2f} {metric.points}"
    if _decibel(rung) > _decibel(best):
        return ""
    return "no closer to float"


def _decibel(rung: RungResult) -> float:
    """Returns the signal-to-noise ratio of a file's outputs, infinite where they equal float's."""
    return math.inf if rung.sqnr_db is None else rung.sqnr_db
