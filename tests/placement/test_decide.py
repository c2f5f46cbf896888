"""Which file is taken, by times that are made up."""

from __future__ import annotations

import pytest

from qatkit_verify.placement.decide import fastest, measured, noise


@pytest.mark.parametrize(
    ("table", "other", "chosen"),
    [
        ([4.0, 4.1, 4.0], [3.4, 3.5, 3.4], "a"),
        ([4.0, 6.1, 4.0], [3.4, 5.4, 3.5], "a"),  # one session of a slow machine, for both
        ([4.0, 4.1, 4.0], [3.9, 4.2, 3.9], "fixed"),  # slower in one
        ([4.0, 4.4, 4.0], [3.95, 4.0, 3.98], "fixed"),  # faster in each, by less than they differ
        ([4.0, 4.0, 4.0], [4.5, 4.6, 4.5], "fixed"),
    ],
)
def test_the_fastest_is_so_in_each_session_and_beyond_noise(
    table: list[float], other: list[float], chosen: str
) -> None:
    assert fastest({"float": [1.0, 1.0, 1.0], "fixed": table, "a": other}) == chosen


def test_noise_is_the_spread_of_ratios() -> None:
    times = {"float": [5.0, 10.0], "fixed": [4.0, 8.0], "a": [2.0, 5.0]}
    assert noise(times) == pytest.approx((0 + (2 - 1.6) / 2 / 1.8) / 2)
    found = measured("a", 3, 1, None, times)
    assert (found.ms, found.ratio, found.low, found.high) == (2.0, 1.8, 1.6, 2.0)
