"""Tests of object detection: average precision against pycocotools, standard errors by resampling, losses."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from qatkit.config.schema import ScheduleConfig
from qatkit.tasks import task_of
from qatkit.tasks.average_precision import CROWD, IGNORED, detections, picture_values, precisions
from qatkit.tasks.decisions.matched_boxes import Boxes
from qatkit.tasks.detection import Detection
from qatkit_verify.errors import ConfigError

Array = NDArray[Any]
PICTURES, CLASSES, SIDE = 40, 3, 100.0


def drawn_boxes(draw: np.random.Generator, count: int) -> Array:
    """Returns the corners [count, 4] of random boxes that are at least 4 wide and high."""
    corners = np.sort(draw.uniform(0, SIDE, (count, 2, 2)), 1).reshape(count, 4)
    corners[:, 2:] += 4
    return corners


@pytest.fixture(scope="module")
def pictures() -> tuple[Array, Array]:
    """Returns outputs [N, boxes, 4 + classes] near most objects, and labelled boxes [N, n, 6]."""
    draw = np.random.default_rng(0)
    truth, rows = np.full((PICTURES, 12, 6), -1.0), np.zeros((PICTURES, 60, 4 + CLASSES))
    for place in range(PICTURES):
        count = int(draw.integers(0, 12))
        truth[place, :count, 0] = draw.integers(0, CLASSES, count)
        truth[place, :count, 1:5] = drawn_boxes(draw, count)
        truth[place, :count, 5] = 0
        near = np.concatenate([truth[place, :count, 1:5]] * 4)[:48]
        rows[place, : len(near), :4] = near + draw.normal(0, 4, near.shape)
        rows[place, :, 2:4] = np.maximum(rows[place, :, 2:4], rows[place, :, :2] + 1)
        labels = np.concatenate([truth[place, :count, 0]] * 4)[:48].astype(int)
        rows[place, np.arange(len(near)), 4 + labels] = draw.uniform(0, 1, len(near))
        rows[place, 48:, :4] = drawn_boxes(draw, 12)
        rows[place, 48:, 4:] = draw.uniform(0, 0.7, (12, CLASSES))
    return rows.astype(np.float32), truth


def coco_precisions(found: list[Boxes], truth: Array) -> Array:
    """Returns the average precisions of pycocotools, [classes, thresholds]."""
    boxes, results = list[dict[str, Any]](), list[dict[str, Any]]()
    for image, rows in enumerate(truth):
        for label, x1, y1, x2, y2, ignored in rows[rows[:, 0] >= 0]:
            boxes.append({
                "id": len(boxes) + 1, "image_id": image, "category_id": int(label), "area": (x2 - x1) * (y2 - y1),
                "bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": int(ignored == CROWD),
            })  # fmt: skip
        one = found[image]
        for (x1, y1, x2, y2), score, label in zip(one.corners, one.scores, one.classes, strict=True):
            results.append({
                "image_id": image, "category_id": int(label), "bbox": [x1, y1, x2 - x1, y2 - y1], "score": score,
            })  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO()
        known.dataset = {
            "info": {},
            "images": [{"id": image, "width": 200, "height": 200} for image in range(len(truth))],
            "categories": [{"id": label, "name": str(label)} for label in range(CLASSES)],
            "annotations": boxes,
        }
        known.createIndex()
        judge = COCOeval(known, known.loadRes(results), "bbox")
        judge.evaluate()
        judge.accumulate()
    precision = judge.eval["precision"][:, :, :, 0, 2]  # thresholds, recalls, classes
    return np.asarray(precision.mean(1).T)


@pytest.mark.parametrize("crowds", [0.0, 0.2])
def test_average_precision_is_that_of_pycocotools(pictures: tuple[Array, Array], crowds: float) -> None:
    rows, truth = pictures[0], pictures[1].copy()
    draw = np.random.default_rng(1)
    truth[..., 5][(draw.random(truth.shape[:2]) < crowds) & (truth[..., 0] >= 0)] = CROWD
    found = [detections(one) for one in rows]
    values = np.stack([picture_values(one, two, CLASSES) for one, two in zip(found, truth, strict=True)])
    wanted = coco_precisions(found, truth)
    np.testing.assert_allclose(precisions(values), wanted, atol=1e-12)
    assert 0.1 < wanted.mean() < 0.9


def test_ignored_boxes_are_neither_right_nor_wrong() -> None:
    truth = np.array([[0, 0, 0, 10, 10, 0], [0, 50, 50, 60, 60, IGNORED]], np.float64)
    near, far = [0.0, 0, 10, 10], [50.0, 50, 60, 60]

    def average(corners: list[list[float]], scores: list[float]) -> float:
        found = Boxes(np.array(corners), np.array(scores), np.zeros(len(scores), np.int64))
        return float(precisions(picture_values(found, truth, 1)[None])[0, 0])

    assert average([far, near], [0.9, 0.8]) == 1  # a false positive before `near` would halve it
    assert average([[20.0, 20, 30, 30], near], [0.9, 0.8]) == pytest.approx(0.5)
    assert average([far, far, near], [0.9, 0.85, 0.8]) == pytest.approx(0.5)  # ignored boxes match once


def test_sums_of_batches_are_the_metric_but_for_bins(pictures: tuple[Array, Array]) -> None:
    rows, truth = pictures
    task = task_of("detection")
    parts = [
        task.total(torch.from_numpy(rows[start : start + 9]), torch.from_numpy(truth[start : start + 9]))
        for start in range(0, PICTURES, 9)
    ]
    exact = task.mean(task.values(rows, truth))
    assert task.figure(torch.stack(parts).sum(0), PICTURES) == pytest.approx(exact, abs=0.3)
    meter = task.meter()
    for start in range(0, PICTURES, 9):
        meter.add(rows[start : start + 9], truth[start : start + 9])
    scores = meter.result()
    assert scores.score == pytest.approx(exact) and scores.images == PICTURES
    assert scores.class_images == tuple(int((truth[..., 0] == label).sum()) for label in range(CLASSES))


def test_the_error_of_a_difference_is_that_of_resampled_pictures(pictures: tuple[Array, Array]) -> None:
    rows, truth = pictures
    task, draw = Detection(), np.random.default_rng(2)
    near = rows + draw.normal(0, [2] * 4 + [0.0] * CLASSES, rows.shape)
    first, second = task.values(rows, truth), task.values(near, truth)
    drawn = [draw.integers(0, PICTURES, PICTURES) for _ in range(300)]
    differences = [task.mean(second[one]) - task.mean(first[one]) for one in drawn]
    assert task.noise(first, second) == pytest.approx(np.std(differences), rel=0.4)
    assert task.worse(first, second, 2.0).startswith("loses ") and not task.worse(second, first, 2.0)


def test_models_agree_by_matched_boxes(pictures: tuple[Array, Array]) -> None:
    rows, _ = pictures
    task = Detection()
    same, other = task.agreement(), task.agreement()
    boxes, scores = rows[..., :4], rows[..., 4:]
    same.add(task.joined([boxes, scores]), rows)
    other.add(rows, task.joined([boxes + 30, scores]))
    assert same.share == 1 and other.share < 0.3
    assert task.errors(rows, rows).max() == 0 < task.errors(rows, rows + 0.01).min()


@pytest.mark.parametrize(
    ("boxes", "told"),
    [
        ([(3, 0, 0, 4, 4, 0)], "has the class 3; classes must be 0..2"),
        ([(0, 4, 0, 4, 4, 0)], r"has no area \(4, 0, 4, 4\)"),
        (-1, r"has no labelled boxes; use \(\)"),
    ],
)
def test_wrong_boxes_are_told(boxes: Any, told: str) -> None:
    task = task_of("detection")
    found = task.check_targets("train", ("a", "b", "c"), [(), task.target(boxes)])
    assert re.search(told, found)
    with pytest.raises(TypeError, match="must be tuples of boxes"):
        task.target("left")


def test_a_model_without_a_loss_is_refused() -> None:
    rows = torch.zeros(1, 2, 7)
    with pytest.raises(ConfigError, match="a detector that can be trained on boxes, with `criterion`"):
        Detection().of_model(torch.nn.Identity()).whole_loss(rows, (), rows, ScheduleConfig())


def test_distillation_is_the_divergence_of_scores_and_corners() -> None:
    draw = np.random.default_rng(0)
    teacher = np.concatenate([drawn_boxes(draw, 5), draw.uniform(0.05, 0.95, (5, CLASSES))], 1)
    mine = teacher + np.concatenate([draw.normal(0, 1, (5, 4)), draw.uniform(-0.04, 0.04, (5, CLASSES))], 1)
    p, q, weights = teacher[:, 4:], mine[:, 4:], teacher[:, 4:].max(1)
    scores = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum()
    sides = np.maximum(np.tile(teacher[:, 2:4] - teacher[:, :2], 2), 1)
    corners = (weights * (((mine - teacher)[:, :4] / sides) ** 2).sum(1)).sum() / (2 * 0.05**2)
    found, wanted = (torch.from_numpy(one)[None] for one in (mine, teacher))
    loss = float(Detection().distillation(found, wanted, 1.0))
    assert loss == pytest.approx((scores + corners) / weights.sum(), rel=1e-6)
    assert float(Detection().distillation(wanted, wanted, 1.0)) == pytest.approx(0, abs=1e-6)


def test_scores_of_zero_have_small_gradients() -> None:
    """A quantized sigmoid can return exactly 0 where the teacher's returns 1e-3."""
    teacher = torch.tensor([[[0.0, 0, 10, 10, 1e-3, 0.9]]])
    found = torch.tensor([[[0.0, 0, 10, 10, 0.0, 0.89]]], requires_grad=True)
    Detection().distillation(found, teacher, 1.0).backward()
    assert found.grad is not None and found.grad.abs().max() < 1
    assert found.grad[0, 0, 4] == 0 and found.grad[0, 0, 5] < 0
