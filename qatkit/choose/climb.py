"""The rule of a climb (rescue=ladder), which runs stronger and stronger methods (rungs) until the target is met.

It uses only the figures in these reports, not the results of single images.

    rung_why_not     why later rungs do not build on a rung: by the metric, or by the outputs
    meets_target     whether a rung meets the target

The rungs are the entrants of one contest (`qatkit.jobs.rescue`). They are judged by the reports of their
runs.
"""

from __future__ import annotations

import math

from qatkit.choose.verdict import SURE, chance, keeps
from qatkit.config.schema import TargetConfig
from qatkit.records.ladder import RungResult
from qatkit_verify.classification import NAMES
from qatkit_verify.records import Metric

_DIGITS = 6  # digits of a drop in points; further digits are errors of subtraction


def meets_target(rung: RungResult, target: TargetConfig) -> bool:
    """Returns whether a rung meets the target in the main metric, or without labels in its agreement with float.

    A minimum SQNR of the target has to be met too. A rung that was not measured meets no target.
    """
    drop = None if rung.drop is None else round(rung.drop, _DIGITS)
    return rung.measured and keeps(target, drop, rung.agreement or 0.0, rung.sqnr_db)


def rung_why_not(rung: RungResult, best: RungResult, metric: Metric = NAMES.main) -> str:
    """Returns the reason why later rungs build on `best` instead of `rung`; "" if they build on `rung`.

    A metric in percent decides if the difference exceeds chance, estimated from the number of images on which
    the two may differ. Otherwise the error of the outputs (SQNR) decides. It also decides for metrics in other
    units, for which chance cannot be estimated from these reports.
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
    """Returns the signal-to-noise ratio of a file's outputs in dB; infinity if they equal float's."""
    return math.inf if rung.sqnr_db is None else rung.sqnr_db
