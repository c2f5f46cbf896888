"""Tests of segmentation: metrics against NumPy, standard errors against resampling, and sums over batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from qatkit.config.schema import ScheduleConfig
from qatkit.tasks import task_of
from qatkit.tasks.segmentation import Segmentation
from qatkit_verify.errors import ConfigError

Pixels = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]
IMAGES, CLASSES, HEIGHT, WIDTH = 60, 4, 12, 10


@pytest.fixture(scope="module")
def pixels() -> Pixels:
    """Returns logits of a model and of a similar one, [N, C, H, W], and label maps with ignored pixels."""
    draw = np.random.default_rng(0)
    maps = draw.integers(0, CLASSES - 1, (IMAGES, HEIGHT, WIDTH))  # the last class never occurs
    shares = draw.uniform(0.5, 3, (IMAGES, 1, 1, 1))
    exact = draw.normal(size=(IMAGES, CLASSES, HEIGHT, WIDTH)) + shares * np.moveaxis(
        np.eye(CLASSES)[maps], -1, 1
    )
    near = exact + 0.3 * draw.normal(size=exact.shape)
    maps[:, :2] = 255
    return exact.astype(np.float32), near.astype(np.float32), maps


def union(found: NDArray[np.int64], maps: NDArray[np.int64]) -> float:
    """Returns the mean IoU over the classes that occur, by its definition."""
    shares = []
    for label in range(CLASSES):
        a, b = (found == label) & (maps != 255), maps == label
        if (a | b).any():
            shares.append((a & b).sum() / (a | b).sum())
    return float(100 * np.mean(shares))


def test_metrics_are_those_of_their_definitions(pixels: Pixels) -> None:
    exact, _, maps = pixels
    task = task_of("segmentation")
    meter = task.meter()
    for start in range(0, IMAGES, 7):
        meter.add(exact[start : start + 7], maps[start : start + 7])
    scores, found = meter.result(), exact.argmax(1)

    assert scores.score == pytest.approx(union(found, maps)) == task.mean(task.values(exact, maps))
    assert scores.metrics[1].value == pytest.approx(100 * (found == maps)[maps != 255].mean())
    counted = maps != 255
    assert scores.class_right == tuple(int(((found == c) & (maps == c)).sum()) for c in range(CLASSES))
    joined = [int((((found == c) & counted) | (maps == c)).sum()) for c in range(CLASSES)]
    assert scores.class_images == tuple(joined)


def test_sums_of_batches_are_the_metric(pixels: Pixels) -> None:
    exact, _, maps = pixels
    task = Segmentation()
    parts = [
        task.total(torch.from_numpy(exact[start : start + 9]), torch.from_numpy(maps[start : start + 9]))
        for start in range(0, IMAGES, 9)
    ]
    assert float(task.figure(torch.stack(parts).sum(0).double(), IMAGES)) == pytest.approx(
        union(exact.argmax(1), maps)
    )


def test_the_error_of_a_difference_is_that_of_resampled_images(
    pixels: Pixels,
) -> None:
    exact, near, maps = pixels
    task, draw = Segmentation(), np.random.default_rng(1)
    first, second = task.values(exact, maps), task.values(near, maps)
    drawn = [draw.integers(0, IMAGES, IMAGES) for _ in range(2000)]
    differences = [task.mean(second[one]) - task.mean(first[one]) for one in drawn]
    assert task.noise(first, second) == pytest.approx(np.std(differences), rel=0.15)
    alone = np.std([task.mean(first[one]) for one in drawn])
    assert task.spread(task.mean(first), IMAGES, first) == pytest.approx(alone, rel=0.15)
    assert task.worse(first, second, 2.0).startswith("loses ") and not task.worse(second, first, 2.0)


def test_the_loss_counts_labelled_pixels_alone(pixels: Pixels) -> None:
    logits, maps = torch.from_numpy(pixels[0]), torch.from_numpy(pixels[2])
    task, schedule = Segmentation(), ScheduleConfig(label_smoothing=0.1)
    wanted = F.cross_entropy(logits, maps, ignore_index=255, label_smoothing=0.1)
    assert float(task.loss(logits, maps, schedule)) == pytest.approx(float(wanted), rel=1e-5)
    nothing = torch.full_like(maps, 255)
    assert float(task.loss(logits, nothing, ScheduleConfig())) == 0


def test_models_agree_pixel_by_pixel(pixels: Pixels) -> None:
    exact, near, _ = pixels
    counted = Segmentation().agreement()
    for start in range(0, IMAGES, 16):
        counted.add(exact[start : start + 16], near[start : start + 16])
    assert counted.share == pytest.approx((exact.argmax(1) == near.argmax(1)).mean())
    assert 0.5 < counted.share < 1


def test_logits_of_another_size_are_refused(pixels: Pixels) -> None:
    exact, _, maps = pixels
    with pytest.raises(ConfigError, match=r"the height and width of the label maps \(12 x 10\), not 6 x 5"):
        Segmentation().values(exact[:, :, ::2, ::2], maps)
