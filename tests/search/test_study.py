"""Tests of shared studies: no trial lost or counted twice, other studies refused, pruning as in Optuna."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from shared_study import ASKED, SPACE, TESTED, figures_of, in_a_process, study_in  # noqa: E402

from qatkit.config.schema import SearchConfig  # noqa: E402
from qatkit.config.search_space import axes  # noqa: E402
from qatkit.report.search_page import search_page  # noqa: E402
from qatkit.search.median import falls_behind  # noqa: E402
from qatkit.search.storage import JOURNAL  # noqa: E402
from qatkit.search.study import SharedStudy  # noqa: E402
from qatkit_verify.errors import ConfigError  # noqa: E402


@pytest.mark.parametrize("storage", [None, "journal", pytest.param("postgresql", marks=pytest.mark.slow)])
def test_a_trial_whose_worker_was_killed_goes_on_once(
    tmp_path: Path, storage: str | None, request: pytest.FixtureRequest
) -> None:
    asked = replace(ASKED, storage=request.getfixturevalue(storage) if storage == "postgresql" else storage)

    def killed() -> None:
        claimed = study_in(tmp_path, asked).claim()
        assert claimed is not None and claimed.number == 0
        with claimed:
            claimed.epoch("last", 1, 55.0)
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_process(killed) == -signal.SIGKILL
    study = study_in(tmp_path, asked)
    values = study.optuna.trials[0].params
    again = study.claim()
    assert again is not None and (again.number, again.values, again.epochs) == (0, values, {"last 1": 55.0})

    with again:  # another worker does not take this trial

        def other() -> None:
            claimed = study_in(tmp_path, asked).claim()
            assert claimed is not None and claimed.number == 1
            with claimed:
                claimed.complete(figures_of(1), TESTED)

        assert in_a_process(other) == 0
        again.complete(figures_of(0), TESTED)
    while (claimed := study.claim()) is not None:
        with claimed:
            claimed.complete(figures_of(claimed.number), TESTED)
    trials = study.records().trials
    assert [(trial.number, trial.state) for trial in trials] == [(number, "complete") for number in range(3)]
    assert [trial.attempts for trial in trials] == [2, 1, 1]
    assert [dict(trial.figures) for trial in trials] == [figures_of(number) for number in range(3)]


def test_an_end_that_was_told_is_no_beginning_to_take_back(tmp_path: Path) -> None:
    """Simulates a signal just after the result was stored: `uncount`, called then, must change nothing."""
    study = study_in(tmp_path)
    claimed = study.claim()
    assert claimed is not None
    with claimed:
        claimed.complete(figures_of(0), TESTED)
        claimed.uncount()
    (trial,) = study.records().trials
    assert trial.state == "complete" and not list(tmp_path.rglob(".uncounted"))


def test_front_holds_the_unbeaten_trials_within_the_bounds(tmp_path: Path) -> None:
    study = study_in(tmp_path, replace(ASKED, trials=6, constraints=["size<=4"]))
    made = [(90.0, 3.0), (90.0, 2.0), (91.0, 4.0), (99.0, 5.0), (89.0, 3.5), (92.0, 4.0)]
    for accuracy, size in made:
        claimed = study.claim()
        assert claimed is not None
        with claimed:
            claimed.complete({"accuracy": accuracy, "size": size}, {"accuracy": 100 - accuracy})
    best = {
        i
        for i, (a, s) in enumerate(made)
        if s <= 4 and not any(t <= 4 and b >= a and t <= s and (b, t) != (a, s) for b, t in made)
    }
    records = study.records()
    assert best == {1, 5}
    assert [trial.number for trial in records.front] == [5, 1]  # most accurate first
    assert [trial.feasible for trial in records.trials] == [True, True, True, False, True, True]
    page = search_page(records)
    front, every = page.split("All trials")
    assert front.count(">92.00<") == 1 and front.count(">8.00<") == 1  # held-out accuracy and test error
    assert ">8.00<" not in every and every.count(">92.00<") == 1
    assert page.count('class="pin chosen"') == 2 and page.count(">outside</span>") == 1


@pytest.mark.parametrize("storage", [None, "journal"])
@pytest.mark.parametrize("objectives", [["sqnr"], ["sqnr", "size"], ["size", "sqnr", "latency"]])
def test_equal_outputs_are_the_best_whatever_is_stored_where(
    tmp_path: Path, storage: str | None, objectives: list[str]
) -> None:
    """Checks that an infinite SQNR is stored, meets bounds, is on the front and does not break proposals."""
    asked = replace(
        ASKED, trials=12, objectives=objectives, constraints=["sqnr>=30"], storage=storage, startup=3
    )
    study = study_in(tmp_path, asked)
    while (claimed := study.claim()) is not None:
        with claimed:
            decibel = math.inf if claimed.number % 3 == 1 else 25.0 + claimed.number
            claimed.complete({"sqnr": decibel, "size": 3.0 + claimed.number, "latency": 2.0}, {})
    records = study_in(tmp_path, asked).records()
    equal = [trial for trial in records.trials if trial.number % 3 == 1]
    assert len(equal) == 4 and all(trial.figures["sqnr"] == math.inf and trial.feasible for trial in equal)
    assert [trial.number for trial in records.trials if not trial.feasible] == [0, 2, 3]
    front = {trial.number for trial in records.front}
    assert front == ({1, 4, 7, 10} if objectives == ["sqnr"] else {1})
    assert "equal" in search_page(records) and "nan" not in search_page(records)


def test_more_trials_than_are_asked_for_by_now_are_told(tmp_path: Path) -> None:
    study = study_in(tmp_path, replace(ASKED, trials=2))
    assert study.records().told() == "0 of 2 trials: 0 complete"
    while (claimed := study.claim()) is not None:
        with claimed:
            claimed.complete(figures_of(claimed.number), TESTED)
    assert study.records().told() == "2 of 2 trials: 2 complete"
    fewer = study_in(tmp_path, replace(ASKED, trials=1))
    assert fewer.claim() is None
    assert fewer.records().told() == "2 trials (1 requested now): 2 complete"


def test_proposals_follow_seed_and_number(tmp_path: Path) -> None:
    def drawn(folder: Path, seed: int) -> list[Any]:
        found = []
        for _ in range(3):
            claimed = study_in(folder, seed=seed).claim()  # a new worker each time
            assert claimed is not None
            with claimed:
                claimed.complete(figures_of(claimed.number), TESTED)
            found.append(claimed.values)
        return found

    first = drawn(tmp_path / "a", 0)
    assert first == drawn(tmp_path / "b", 0) != drawn(tmp_path / "c", 1)
    assert len({str(values) for values in first}) == 3


@pytest.mark.parametrize(
    ("asked", "settings", "says"),
    [
        (replace(ASKED, space=SPACE | {"calibration": ["minmax", "entropy"]}), {},
         r"output_dir=.*calibration is \[minmax, mse\] there, \[minmax, entropy\] here"),
        (replace(ASKED, space={"schedule.lr": SPACE["schedule.lr"]}), {}, "calibration is .* there, absent here"),
        (replace(ASKED, objectives=["accuracy"]), {}, r"search\.objectives="),
        (replace(ASKED, constraints=["size<=3"]), {}, r"search\.constraints="),
        (ASKED, {"schedule.epochs": 3}, r"schedule\.epochs is 2 there, 3 here"),
    ],
)  # fmt: skip
def test_another_study_is_refused_with_what_differs(
    tmp_path: Path, asked: SearchConfig, settings: dict[str, Any], says: str
) -> None:
    study_in(tmp_path)
    with pytest.raises(ConfigError, match=says):
        study_in(tmp_path, asked, **settings)
    study_in(tmp_path, replace(ASKED, trials=9, attempts=2))


@pytest.mark.parametrize("ends", ["none", "failed", "complete", "pruned", "running"])
def test_a_study_without_finished_trials_says_how_to_start_over(tmp_path: Path, ends: str) -> None:
    study = study_in(tmp_path)
    if ends != "none":
        claimed = study.claim()
        assert claimed is not None
        with claimed:
            if ends == "failed":
                claimed.fail("as a test")
            elif ends == "pruned":
                claimed.prune()
            elif ends == "complete":
                claimed.complete(figures_of(0), TESTED)
    changes: list[tuple[SearchConfig, dict[str, Any]]] = [
        (ASKED, {"schedule.epochs": 3}),
        (replace(ASKED, objectives=["size"]), {}),
    ]
    for asked, settings in changes:
        with pytest.raises(ConfigError) as caught:
            study_in(tmp_path, asked, **settings)
        advice = f"none of its trials finished, so remove {tmp_path} to start over"
        assert (advice in str(caught.value)) == (ends in ("none", "failed"))


def test_a_study_whose_folder_is_elsewhere_is_refused(tmp_path: Path) -> None:
    asked = replace(ASKED, storage=f"sqlite:///{tmp_path}/shared.db")
    study_in(tmp_path / "here", asked)
    with pytest.raises(ConfigError, match="output_dir"):
        study_in(tmp_path / "there", asked)


def _another_name(folder: Path) -> None:
    SharedStudy(ASKED, axes(SPACE), "other", folder, 0, {})


def _another_storage(folder: Path) -> None:
    study_in(folder, replace(ASKED, storage=None))


def _a_lost_storage(folder: Path) -> None:
    (folder / JOURNAL).unlink()
    study_in(folder)


@pytest.mark.parametrize("begins", [_another_name, _another_storage, _a_lost_storage])
def test_a_study_begins_where_there_are_no_trials_of_another(
    tmp_path: Path, begins: Callable[[Path], None]
) -> None:
    """Trials of two studies would write their reports to the same numbered folders."""
    first = study_in(tmp_path).claim()
    assert first is not None
    with first:
        first.complete(figures_of(0), TESTED)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"output_dir=.*: expected a folder without trials, since the study"
        ):
            begins(tmp_path)
    if begins is not _a_lost_storage:
        second = study_in(tmp_path).claim()  # the first study continues
        assert second is not None and second.number == 1


def test_trials_end_early_where_optunas_median_pruner_ends_them() -> None:
    """Compares 200 random curves with the previously finished ones, epoch by epoch."""
    draw = random.Random(0)
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(4, 0))
    finished: list[dict[str, float]] = []
    ended = 0
    for _ in range(200):
        trial, epochs = study.ask(), dict[str, float]()
        for epoch in range(draw.randint(1, 5)):
            epochs[f"last {epoch}"] = draw.uniform(0, 100)
            trial.report(epochs[f"last {epoch}"], epoch)
            assert falls_behind(epochs, finished, 4) == trial.should_prune()
        if falls_behind(epochs, finished, 4):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            ended += 1
        else:
            study.tell(trial, epochs[f"last {epoch}"])
            finished.append(epochs)
    assert 20 < ended < 180


def test_a_trial_that_has_just_ended_is_nobodys(tmp_path: Path) -> None:
    """Another worker completes the trial after it was listed as running, but before it is locked."""
    one, other = study_in(tmp_path / "study"), study_in(tmp_path / "study")
    claimed = one.claim()
    assert claimed is not None
    running = other.optuna.get_trials(states=(optuna.trial.TrialState.RUNNING,))
    with claimed:
        claimed.complete(figures_of(0), {})
    assert other._taken(running[0]) is None
    following = other.claim()
    assert following is not None and following.number == 1


def test_whole_ends_are_another_space_than_real_ones(tmp_path: Path) -> None:
    whole, real = (axes({"mine.depth": {"low": 0, "high": high}}) for high in (1, 1.0))
    SharedStudy(ASKED, whole, "name", tmp_path, 0, {})
    with pytest.raises(ConfigError, match="the study in this folder has another"):
        SharedStudy(ASKED, real, "name", tmp_path, 0, {})
    SharedStudy(ASKED, whole, "name", tmp_path, 0, {})


@pytest.mark.parametrize(("objectives", "constraints", "ends"), [
    (["accuracy"], [], True), (["latency"], ["drop<=1"], True), (["latency", "size"], [], False)
])  # fmt: skip
def test_epochs_end_trials_only_where_accuracy_is_aimed_at(
    objectives: list[str], constraints: list[str], ends: bool, tmp_path: Path
) -> None:
    asked = replace(ASKED, objectives=objectives, constraints=constraints, prune=True, startup=1)
    study = study_in(tmp_path / "study", asked)
    for number in range(3):
        claimed = study.claim()
        assert claimed is not None
        with claimed:
            ended = claimed.epoch("last", 1, 90.0 if number < 2 else 10.0)
            if number < 2:
                claimed.complete(
                    {**figures_of(number), "drop": 0.0, "latency": 1.0, "size": 1.0, "accuracy": 90.0}, {}
                )
    assert ended == ends
