"""Tests of detectors that return boxes in any order: shuffled boxes compare as in their original order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qatkit.tasks.detection import Detection
from qatkit.tasks.unordered_boxes import are_unordered, in_order_of, nearest
from qatkit.verify.fidelity import Distance

PROPOSALS, CLASSES = 12, 3


def rows(seed: int = 0) -> NDArray[Any]:
    """Returns well-separated boxes of two images, [2, PROPOSALS * CLASSES, 4 + CLASSES]."""
    rng = np.random.default_rng(seed)
    corners = np.arange(PROPOSALS)[:, None, None] * 50 + rng.uniform(0, 20, (2, PROPOSALS, CLASSES, 2))
    found = np.zeros((2, PROPOSALS, CLASSES, 4 + CLASSES), np.float32)
    found[..., :2], found[..., 2:4] = corners, corners + 30
    label = np.arange(CLASSES)
    found[..., label, 4 + label] = rng.uniform(0.1, 0.9, (2, PROPOSALS, CLASSES))
    return found.reshape(2, -1, 4 + CLASSES)


def shuffled(boxes: NDArray[Any]) -> NDArray[Any]:
    order = np.random.default_rng(3).permutation(PROPOSALS)
    return boxes.reshape(2, PROPOSALS, CLASSES, -1)[:, order].reshape(boxes.shape)


def test_proposals_are_put_in_the_order_of_the_others() -> None:
    boxes = rows()
    np.testing.assert_array_equal(in_order_of(boxes, shuffled(boxes)), boxes)
    moved = boxes + np.float32(1.5) * (np.arange(4 + CLASSES) < 4)
    np.testing.assert_array_equal(in_order_of(boxes, shuffled(moved)), moved)


def test_a_proposal_without_a_partner_takes_what_is_left() -> None:
    boxes = rows()
    other = shuffled(boxes)
    far = other.reshape(2, PROPOSALS, CLASSES, -1)
    far[:, 0, :, :4] += 5000
    found = in_order_of(boxes, other)
    same = (found == boxes).all(2).reshape(2, PROPOSALS, CLASSES).all(2)
    assert (same.sum(1) == PROPOSALS - 1).all()
    assert sorted(map(tuple, found[0])) == sorted(map(tuple, other[0]))


def test_an_order_changes_neither_errors_nor_nearness() -> None:
    boxes, task = rows().astype(np.float64), Detection(unordered=True)
    noisy = boxes + np.random.default_rng(1).normal(0, 0.01, boxes.shape)
    wanted, found = Distance(Detection()), Distance(task)
    wanted.add(boxes, noisy)
    found.add(boxes, shuffled(noisy))
    assert found.result() == pytest.approx(wanted.result())
    errors = Detection().errors(boxes, noisy)
    np.testing.assert_array_equal(task.errors(boxes, shuffled(noisy)), errors)
    assert Detection().errors(boxes, shuffled(noisy)).min() > 1000 * errors.max()


def test_distillation_finds_the_teachers_box() -> None:
    teacher = torch.from_numpy(rows())
    output = teacher.clone().requires_grad_()
    task, other = Detection(unordered=True), torch.from_numpy(shuffled(rows()))
    loss = task.distillation(output, other, 1.0)
    loss.backward()
    assert abs(loss.item()) < 1e-6 and output.grad is not None and output.grad.abs().max() < 1e-6
    near = torch.from_numpy(rows() + np.float32(0.5))
    found, same = nearest(near, other)
    assert same.all() and torch.equal(found, teacher)
    wanted = Detection().distillation(near, teacher, 1.0)
    torch.testing.assert_close(task.distillation(near, other, 1.0), wanted)
    far = teacher.clone()
    far[..., :4] += 5000
    assert not nearest(far, other)[1].any() and task.distillation(far, other, 1.0) == 0


def test_rows_with_one_class_each_are_recognised() -> None:
    scores = rows()[..., 4:]
    assert are_unordered(scores)
    assert not are_unordered(np.full_like(scores, 0.1))  # grid cells have scores for all classes
    assert not are_unordered(scores[..., :1]) and not are_unordered(scores[:, :-1])
    boxes, other = rows()[..., :4], shuffled(rows())
    task = Detection().suited([boxes, scores], ["boxes", "scores"], 2)
    aligned = task.aligned([boxes, scores], [other[..., :4], other[..., 4:]])
    for found, wanted in zip(aligned, (boxes, scores), strict=True):
        np.testing.assert_array_equal(found, wanted)
