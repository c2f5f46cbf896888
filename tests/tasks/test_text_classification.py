"""Tests of text classification: accuracy and macro F1 against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from qatkit.tasks import task_of


def test_figures_are_accuracy_and_mean_f1() -> None:
    draw = np.random.default_rng(0)
    logits, labels = (
        draw.normal(size=(300, 4)).astype(np.float32),
        draw.integers(0, 3, 300),
    )  # class 3 has no texts
    task = task_of("text_classification")
    meter = task.meter()
    for rows in (slice(0, 100), slice(100, 300)):
        meter.add(logits[rows], labels[rows])
    found, guess = meter.result(), logits.argmax(1)

    precision = [(labels[guess == one] == one).mean() for one in range(4)]
    recall = [(guess[labels == one] == one).mean() if one < 3 else 0.0 for one in range(4)]
    f1 = [2 * p * r / (p + r) if p + r else 0.0 for p, r in zip(precision, recall, strict=True)]
    assert [one.value for one in found.metrics] == pytest.approx(
        [100 * (guess == labels).mean(), 100 * np.mean(f1)]
    )
    assert found.class_images == (*np.bincount(labels), 0) and found.images == 300
    assert sum(found.class_right) == (guess == labels).sum()


def test_classes_that_nothing_has_do_not_count() -> None:
    meter = task_of("text_classification").meter()
    meter.add(np.eye(3, dtype=np.float32)[[0, 1, 1]], np.array([0, 1, 1]))
    assert [one.value for one in meter.result().metrics] == [100.0, 100.0]
