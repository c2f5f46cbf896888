"""Tests of which file placement=measured chooses, with made-up times."""

from __future__ import annotations

import pytest

from qatkit_verify.latency import Session
from qatkit_verify.placement.decide import chosen, fastest, measured, noise
from qatkit_verify.placement.quiet import Timed, quiet_ones, summed_up


@pytest.mark.parametrize(
    ("table", "other", "chosen"),
    [
        ([4.0, 4.1, 4.0], [3.4, 3.5, 3.4], "a"),
        ([4.0, 6.1, 4.0], [3.4, 5.4, 3.5], "a"),  # the machine was slow in one session, for both
        ([4.0, 4.1, 4.0], [3.9, 4.2, 3.9], "fixed"),  # slower in one session
        ([4.0, 4.4, 4.0], [3.95, 4.0, 3.98], "fixed"),  # always faster, but by less than the noise
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


@pytest.mark.parametrize(
    ("quiet", "threads", "other", "name"),
    [
        (True, 2, [3.0, 3.0, 3.0], "a"),
        (False, 2, [3.0, 3.0, 3.0], "fixed"),  # one busy core could explain the lead
        (False, 2, [1.5, 1.6, 1.5], "a"),
        (False, 4, [1.5, 1.6, 1.5], "fixed"),
        (False, 1, [3.0, 3.0, 3.0], "a"),
    ],
)
def test_a_busy_machine_requires_a_lead_beyond_one_busy_core(
    quiet: bool, threads: int, other: list[float], name: str
) -> None:
    times = {"float": [9.0, 9.0, 9.0], "fixed": [4.0, 4.0, 4.0], "a": other}
    assert chosen(Timed(times, quiet, 0.3), threads) == name


def session(ms: float, waited: float = 0.0) -> Session:
    """Returns a session of three files that take 5, 4 and 3 ms, multiplied by `ms`."""
    return Session({"float": 5.0 * ms, "fixed": 4.0 * ms, "a": 3.0 * ms}, waited)


def test_sessions_with_waits_or_slower_files_do_not_count() -> None:
    calm, waiting, slow = session(1.0), session(1.0, 0.2), session(1.4)
    assert quiet_ones([slow]) == [slow]  # nothing shows yet that it is slow
    assert quiet_ones([slow, waiting, calm]) == [calm]
    unlucky = Session({**calm.ms, "a": 4.5}, 0.0)  # one file's weights are badly placed in memory
    assert quiet_ones([calm, unlucky]) == [calm, unlucky]


def test_enough_quiet_sessions_are_all_that_is_kept() -> None:
    found = [session(1.0), session(1.4), session(1.02), session(1.0, 0.4), session(1.01)]
    timed = summed_up(found, 3)
    assert timed.quiet and timed.ms["fixed"] == pytest.approx([4.0, 4.08, 4.04])
    timed = summed_up(found[:4], 3)  # only two are quiet, so all count
    assert timed.quiet and timed.ms["fixed"] == pytest.approx([4.0, 5.6, 4.08, 4.0]) and timed.waited == 0.0
    timed = summed_up([session(1.0, 0.4)] * 6, 3)
    assert not timed.quiet and timed.waited == 0.4 and len(timed.ms["a"]) == 6
