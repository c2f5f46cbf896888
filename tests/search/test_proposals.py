"""Tests that no settings are tried twice, for any worker and outcome; a search ends when none are left."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from shared_study import ASKED, TESTED, figures_of, in_a_process, study_in  # noqa: E402

from qatkit.config.search_space import axes  # noqa: E402
from qatkit.search.proposals import distribution  # noqa: E402
from qatkit.search.storage import JOURNAL  # noqa: E402

SMALL: dict[str, Any] = {
    "calibration": ["minmax", "mse"],
    "schedule.epochs": {"low": 1, "high": 3},
    "schedule.weight_decay": {"low": 0, "high": 0.2, "step": 0.1},
}
EVERY = set(itertools.product(["minmax", "mse"], [1, 2, 3], [0, 1, 2]))


def _point(values: Mapping[str, Any]) -> tuple[str, int, int]:
    """Returns a point of the space, with the weight decay in tenths, as an integer."""
    tenths = 10 * values["schedule.weight_decay"]
    assert tenths == pytest.approx(round(tenths))
    return values["calibration"], values["schedule.epochs"], round(tenths)


@pytest.mark.parametrize("storage", [None, pytest.param("journal", marks=pytest.mark.slow)])
@pytest.mark.parametrize("trials", [12, 18, 40])
def test_every_trial_of_a_small_space_is_another_one(
    tmp_path: Path, trials: int, storage: str | None
) -> None:
    """Runs two workers: one keeps its first trial running while the other completes, fails or prunes others."""
    asked = replace(ASKED, space=SMALL, trials=trials, startup=2, storage=storage)
    kept = study_in(tmp_path, asked).claim()
    assert kept is not None

    def other() -> None:
        study = study_in(tmp_path, asked)
        while (claimed := study.claim()) is not None:
            with claimed:
                if claimed.number % 4 == 1:
                    claimed.fail("as a test")
                elif claimed.number % 4 == 2:
                    claimed.prune()
                else:
                    claimed.complete(figures_of(0), TESTED)

    with kept:
        assert in_a_process(other) == 0
        kept.complete(figures_of(0), TESTED)
    records = study_in(tmp_path, asked).records()
    found = [_point(trial.values) for trial in records.trials]
    assert len(found) == len(set(found)) == min(trials, len(EVERY)) and set(found) <= EVERY
    assert [trial.number for trial in records.trials] == list(range(len(found)))
    head = {
        12: "12 of 12 trials",
        18: "18 of 18 trials",
        40: "18 of 18 trials, all points of the space (40 were requested)",
    }
    assert records.told().startswith(f"{head[trials]}: ")


def test_the_best_points_are_not_asked_for_again(tmp_path: Path) -> None:
    """Covers a sampler that keeps proposing points already tried: the best of 100 points is at a corner."""
    space = {"schedule.epochs": {"low": 1, "high": 10}, "schedule.seed": {"low": 1, "high": 10}}
    study = study_in(tmp_path, replace(ASKED, space=space, trials=100, objectives=["accuracy"], startup=5))
    while (claimed := study.claim()) is not None:
        with claimed:
            claimed.complete({"accuracy": 100.0 - sum(claimed.values.values())}, TESTED)
    points = {tuple(trial.values.values()) for trial in study.records().trials}
    assert points == set(itertools.product(range(1, 11), range(1, 11)))


def test_an_older_study_of_equal_trials_continues_with_the_rest(tmp_path: Path) -> None:
    asked = replace(ASKED, space={"calibration": ["minmax", "mse", "entropy"]}, trials=30)
    study = study_in(tmp_path, asked)
    for _ in range(2):
        (first,) = [study.claim()]
        assert first is not None
        with first:
            first.complete(figures_of(0), TESTED)
    done = study.optuna.trials[0]
    for _ in range(3):
        study.optuna.add_trial(done)
    last = study.claim()
    assert last is not None and last.number == 5
    with last:
        last.complete(figures_of(0), TESTED)
    assert study.claim() is None
    assert {trial.values["calibration"] for trial in study.records().trials} == {"minmax", "mse", "entropy"}
    assert study.records().told().startswith("6 trials, all points of the space (30 were requested)")


def test_a_worker_that_is_killed_leaves_a_whole_proposal_or_none(tmp_path: Path) -> None:
    """Cuts the journal after each of the lines that proposing a trial writes, as a kill would."""
    study_in(tmp_path)
    path = tmp_path / JOURNAL
    before = len(path.read_bytes().splitlines())
    assert study_in(tmp_path).claim() is not None
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > before
    for written in range(before, len(lines) + 1):
        path.write_bytes(b"".join(lines[:written]))
        found = study_in(tmp_path).optuna.trials
        assert [set(one.params) for one in found] == [set(ASKED.space)] * (written > before)


@pytest.mark.parametrize(("key", "entry", "count"), [
    ("calibration", ["minmax", "mse"], 2), ("schedule.epochs", {"low": 1, "high": 9, "step": 2}, 5),
    ("schedule.epochs", {"low": 1, "high": 8, "log": True}, 8),
    ("schedule.lr", {"low": 0.1, "high": 0.7, "step": 0.1}, 7),
    ("schedule.lr", {"low": 1e-4, "high": 1e-1, "log": True}, None),
])  # fmt: skip
def test_what_is_left_is_drawn_within_the_axis(key: str, entry: Any, count: int | None) -> None:
    """Relies on Optuna, which refuses a value outside its distribution; each index gives another value."""
    (axis,) = axes({key: entry})
    assert count is None or axis.count == count
    places = set()
    for index in {0, 1, axis.count // 2, axis.count - 1}:
        made = optuna.trial.create_trial(
            params={key: axis.at(index)}, distributions={key: distribution(axis)}, value=0.0
        )
        places.add(axis.place(made.params[key]))
    assert len(places) == len({0, 1, axis.count // 2, axis.count - 1})
