"""Tests of rescue.climb, a ladder of remedies: which rung the next one builds on, and which meets the target."""

from __future__ import annotations

import pytest

from qatkit.choose.climb import meets_target, rung_why_not
from qatkit.config.schema import TargetConfig
from qatkit.records.ladder import RungResult


def rung(score: float = 66.9, sqnr_db: float | None = 21.5) -> RungResult:
    """Returns the result of a rung on 10,000 images, where float has a top-1 of 67.2."""
    return RungResult(
        "a", "rung a", score=score, drop=67.2 - score, agreement=0.97, sqnr_db=sqnr_db, images=10_000
    )


def test_the_target_is_points_below_float() -> None:
    assert meets_target(rung(), TargetConfig(0.3, 1.0))  # 67.2 - 66.9 is 0.2999...97 in floating point
    assert not meets_target(rung(), TargetConfig(0.29, 0.0))
    assert not meets_target(RungResult("a", "rung a"), TargetConfig(100.0, 0.0))  # no file


def test_without_labels_the_target_is_the_same_top1_as_float() -> None:
    row = RungResult("a", "rung a", agreement=0.97, images=512)
    assert meets_target(row, TargetConfig(0.1, 0.97)) and not meets_target(row, TargetConfig(0.1, 0.98))


@pytest.mark.parametrize(
    ("trial", "why"),
    [
        # 2 - 0.97 - 0.97 = 0.06 of 10,000 images may differ: two standard errors are 200 * sqrt(601) / 10,000 = 0.49.
        (rung(score=66.3, sqnr_db=30.0), "loses 0.60 points"),
        (rung(score=67.5, sqnr_db=10.0), ""),
        (rung(score=66.5, sqnr_db=21.6), ""),
        (rung(score=67.3, sqnr_db=21.4), "no closer to float"),
        (rung(sqnr_db=None), ""),  # the same outputs to the last bit
    ],
)
def test_top1_decides_beyond_chance_and_the_outputs_below_it(trial: RungResult, why: str) -> None:
    assert rung_why_not(trial, rung()) == why
