"""Tests of a run's plan as text: units of durations, finished stages, and a total that names unknown ones."""

from __future__ import annotations

import pytest

from qatkit.records.plan import Planned, duration, lines, with_seconds


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "< 1 s"),
        (1.26, "1.3 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (99, "99 s"),
        (120, "2.0 min"),
        (5400, "90 min"),
        (7200, "2.0 h"),
        (200_000, "2.3 days"),
    ],
)
def test_a_time_has_two_digits_and_a_fitting_unit(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_total_is_of_what_is_left_and_names_the_unknown() -> None:
    plan = [
        Planned("float_training", "1 epoch", 600.0, done=True),
        Planned("calibration", "64 images", 30.0),
        Planned("algorithms", "3 compete", why="it depends"),
        Planned("verify", "all checks", 12.0),
    ]
    assert lines("plan:", plan) == [
        "plan:",
        "  stage           what it does  time",
        "  float training  1 epoch       done",
        "  calibration     64 images     30 s",
        "  algorithms      3 compete     not estimated (it depends)",
        "  verify          all checks    12 s",
        "  total                         42 s, plus algorithms",
    ]


def test_a_plan_without_any_estimate_has_no_total() -> None:
    assert lines("plan:", [Planned("a", "b")])[-1].split() == ["total", "not", "estimated"]
    assert lines("plan:", [Planned("a", "b", done=True)])[-1].split() == ["total", "done"]


def test_measured_seconds_are_those_of_this_attempt() -> None:
    plan = [Planned("calibration", "", done=True), Planned("verify", "", 2.0), Planned("bundle", "")]
    found = with_seconds(plan, {"calibration": 9.0, "verify": 3.0})
    assert [one.seconds for one in found] == [None, 3.0, None]
