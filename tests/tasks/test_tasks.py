"""Tests of finding tasks by name, of metrics that should be low or high, and of older records."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from angle_task import Angle

from qatkit.choose.ranges import Calibrated
from qatkit.config.schema import DataConfig
from qatkit.data.checked import check_augmentation
from qatkit.records.comparison import MET, Row, front
from qatkit.records.figures import figures_of
from qatkit.records.ladder import Ladder, RungResult, read_ladder, write_ladder
from qatkit.records.objectives import objectives_of
from qatkit.records.results import Results
from qatkit.search.median import falls_behind
from qatkit.tasks import CLASSIFICATION, task_of
from qatkit_verify.classification import NAMES, classified, names_of
from qatkit_verify.errors import ConfigError
from qatkit_verify.records import Metric, Scores, TaskNames

MAE = Metric("MAE", unit="degrees", higher_is_better=False)


def test_a_task_is_named_by_a_word_or_a_dotted_path() -> None:
    assert task_of("classification").names == NAMES
    assert task_of("angle_task.Angle").names.main == MAE
    for name, allowed in (
        ("clasification", "did you mean classification"),
        ("angle_task.load", "a class derived from"),
        ("qatkit.tasks.base.Task", "a task that implements decision, loss, values, names"),
        ("angle_task.Nothing", "a name in angle_task"),
    ):
        with pytest.raises(ConfigError, match=allowed):
            task_of(name)


def test_a_metric_knows_which_way_is_better() -> None:
    share = Metric("top-1")
    assert (share.key, share.title, share.points, share.of(97.5).text) == (
        "top1",
        "top-1 %",
        "points",
        "97.50 %",
    )
    assert (MAE.key, MAE.title, MAE.points, MAE.of(4.0).text) == (
        "mae",
        "MAE degrees",
        "degrees",
        "4.00 degrees",
    )
    assert share.lost(98.0, 97.0) == MAE.lost(3.0, 4.0) == 1.0
    assert (share.best([1, 2]), MAE.best([1, 2])) == (2, 1)
    assert (share.change(1.5), MAE.change(1.5)) == (-1.5, 1.5)
    assert objectives_of(Angle.names)["accuracy"].largest is False


def test_a_report_has_the_metric_by_its_key_and_says_what_it_is() -> None:
    results = Results("a", "b", "c", task=Angle.names,
                      accuracy={"float": Scores((MAE.of(4.0),), 9), "int8": Scores((MAE.of(4.5),), 9)})  # fmt: skip
    report = json.loads(json.dumps(results.as_dict()))
    assert report["accuracy"]["int8"]["mae"] == 4.5 and names_of(report) == Angle.names
    found = figures_of(report)
    assert (found.score, found.drop) == (4.5, 0.5)


def test_a_report_that_names_no_task_is_of_classification() -> None:
    report = {"accuracy": {"float": {"top1": 98.0}, "int8": {"top1": 97.0}}, "latency": {}, "sizes": {}}
    found = figures_of(report)
    assert (found.score, found.drop, names_of(report)) == (97.0, 1.0, NAMES)


def test_checkpoints_and_ladders_of_before_are_read(tmp_path: Path) -> None:
    row = {
        "method": "mse",
        "output_error": 0.1,
        "top1": 97.0,
        "logit_error": 0.2,
        "chosen": True,
        "images": 9,
    }
    assert Calibrated.from_dict({"candidates": [row]}).candidates[0].score == 97.0
    ladder = Ladder((RungResult("a", "rung a", score=97.0, agreement=1.0),), "a")
    write_ladder(tmp_path, ladder)
    assert read_ladder(tmp_path) == replace(ladder, rungs=[*ladder.rungs])
    stored = json.loads((tmp_path / "ladder.json").read_text())
    del stored["task"]
    stored["rungs"] = [
        {"top1" if key == "score" else key: value for key, value in asdict(ladder.rungs[0]).items()}
    ]
    (tmp_path / "ladder.json").write_text(json.dumps(stored))
    assert read_ladder(tmp_path) == replace(ladder, rungs=[*ladder.rungs])


def test_less_is_better_of_an_error_wherever_runs_are_compared() -> None:
    rows = [
        Row(name, MET, score=score, latency_ms=1.0, bytes=1, task=Angle.names)
        for name, score in (("a", 4), ("b", 5))
    ]
    assert front(rows) == [True, False]
    assert front([replace(row, task=NAMES) for row in rows]) == [False, True]
    others = [{"QAT 1": 4.0}, {"QAT 1": 5.0}, {"QAT 1": 6.0}]
    assert falls_behind({"QAT 1": 5.5}, others, 3, MAE) and not falls_behind({"QAT 1": 4.5}, others, 3, MAE)


def test_models_are_compared_image_by_image() -> None:
    """Covers one of four images lost, errors larger by 1 to 3 degrees, and differences that cancel out."""
    first, second = np.array([True, True, True, False]), np.array([True, True, False, False])
    assert CLASSIFICATION.mean(first) == 75.0 and CLASSIFICATION.worse(first, second, 0.5) == "loses 1 image"
    assert CLASSIFICATION.noise(first, second) == pytest.approx(100 * 2**0.5 / 4)
    errors = np.array([1.0, 2.0, 3.0])
    task = Angle()
    assert task.mean(errors) == 2.0
    assert (
        task.worse(np.zeros(3), errors, 1.0) == "loses 2 degrees"
        and task.worse(errors, np.zeros(3), 1.0) == ""
    )
    assert task.worse(np.zeros(4), np.array([1.0, -1.0, 1.0, -1.0]), 1.0) == ""
    assert task.noise(np.zeros(3), errors) == pytest.approx(14**0.5 / 3)


def test_a_meter_gives_the_mean_of_all_batches() -> None:
    meter = Angle().meter()
    meter.add(np.array([[0.5], [0.0]], np.float32), np.array([20.0, 5.0]))  # outputs in degrees: 30 and 0
    meter.add(np.array([[-1.0]], np.float32), np.array([-57.0]))
    assert meter.result() == Scores((MAE.of(pytest.approx(6.0)),), 3)  # type: ignore[arg-type]


def test_an_augmentation_that_spoils_the_targets_is_refused() -> None:
    check_augmentation(DataConfig(augment="crop_flip"), CLASSIFICATION)
    with pytest.raises(ConfigError, match=r"data\.augment=crop_flip: expected none for image regression"):
        check_augmentation(DataConfig(augment="crop_flip"), Angle())


def test_scores_of_a_classifier_keep_their_keys() -> None:
    found = classified(78.3, None, 10, (5, 5), (4, 3)).as_dict()
    assert found == {"top1": 78.3, "top5": None, "images": 10, "class_images": (5, 5), "class_right": (4, 3)}
    assert TaskNames.from_dict(json.loads(json.dumps(NAMES.as_dict()))) == NAMES
