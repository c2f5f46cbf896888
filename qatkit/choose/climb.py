"""The rule of a climb, over what the reports of finished runs say: figures, without the images behind them.

    rung_why_not     why the rungs behind do not build on a rung: by top-1 beyond chance, else by the outputs
    meets_target     whether a rung is as near to float as asked

Each rung is an entrant of one contest (`qatkit.jobs.rescue`), whose judge is the run that it is.
"""

from __future__ import annotations

import math

from qatkit.choose.verdict import SURE, chance, keeps
from qatkit.config.schema import TargetConfig
from qatkit.records.ladder import RungResult

_DIGITS = 6  # of a drop, in points: what is behind them comes from subtraction


def meets_target(rung: RungResult, target: TargetConfig) -> bool:
    """Whether a file is as near to float as asked: in top-1, without labels in the share of the same top-1."""
    drop = None if rung.drop is None else round(rung.drop, _DIGITS)
    return rung.measured and keeps(target, drop, rung.agreement or 0.0)


def rung_why_not(rung: RungResult, best: RungResult) -> str:
    """Says why the rungs behind don't build on `rung` but on `best`; "" if they do.

    By top-1 where the difference is beyond what chance makes of the images that the two could judge differently, else
    by how near the outputs are to float's.
    """
    if rung.top1 is not None and best.top1 is not None:
        differing = (2 - (rung.agreement or 0.0) - (best.agreement or 0.0)) * rung.images
        if abs(rung.top1 - best.top1) > SURE * chance(differing, rung.images):
            return "" if rung.top1 > best.top1 else f"loses {best.top1 - rung.top1:.2f} points"
    if _decibel(rung) > _decibel(best):
        return ""
    return "no nearer to float"


def _decibel(rung: RungResult) -> float:
    """Signal to noise of a file's outputs; of equal ones it is endless."""
    return math.inf if rung.sqnr_db is None else rung.sqnr_db
