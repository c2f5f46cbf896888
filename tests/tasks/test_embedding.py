"""Tests of embeddings with class labels: recall, agreement and loss, against scikit-learn and plain sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors

from qatkit.config.schema import ScheduleConfig
from qatkit.tasks import task_of
from qatkit.tasks.embedding import Embedding
from qatkit_verify.compare import Output

COUNT, WIDTH, CLASSES = 300, 6, 5
Vectors = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    """Returns embeddings of a model and of a similar one, [N, D], and classes [N]."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, CLASSES, COUNT)
    exact = draw.normal(size=(CLASSES, WIDTH))[labels] + 1.1 * draw.normal(size=(COUNT, WIDTH))
    exact *= draw.uniform(0.1, 10, (COUNT, 1))  # lengths must not matter
    near = exact + 0.1 * np.linalg.norm(exact, axis=1, keepdims=True) * draw.normal(size=exact.shape)
    return exact.astype(np.float32), near.astype(np.float32), labels


def nearest(outputs: NDArray[np.float32]) -> NDArray[np.int64]:
    """Returns the index of each row's nearest other row by cosine."""
    found = NearestNeighbors(n_neighbors=2, metric="cosine", algorithm="brute").fit(
        outputs.astype(np.float64)
    )
    places = found.kneighbors(return_distance=False)  # excludes the row itself
    first: NDArray[np.int64] = places[:, 0]
    return first


def test_recall_leaves_the_sample_itself_out(vectors: Vectors) -> None:
    exact, _, labels = vectors
    task = task_of("embedding")
    meter = task.meter()
    for start in range(0, COUNT, 64):
        meter.add(exact[start : start + 64], labels[start : start + 64])
    wanted = 100 * (labels[nearest(exact)] == labels).mean()
    assert meter.result().score == pytest.approx(wanted) and 40 < wanted < 95
    assert task.mean(task.values(exact, labels)) == pytest.approx(wanted)
    total = task.total(torch.from_numpy(exact), torch.from_numpy(labels))
    assert float(task.figure(total, COUNT)) == pytest.approx(wanted)


def test_agreement_is_the_same_nearest_neighbour(vectors: Vectors) -> None:
    exact, near, _ = vectors
    counted = Embedding().agreement()
    for start in range(0, COUNT, 100):
        counted.add(exact[start : start + 100], near[start : start + 100])
    assert counted.share == pytest.approx((nearest(exact) == nearest(near)).mean()) and counted.share < 0.95
    norms = [np.linalg.norm(one.astype(np.float64), axis=1) for one in (exact, near)]
    cosines = (exact.astype(np.float64) * near).sum(1) / norms[0] / norms[1]
    assert counted.remark == f"cosine to float {cosines.mean():.4f} on average, {cosines.min():.4f} at least"


def test_the_error_of_a_difference_counts_samples(vectors: Vectors) -> None:
    exact, near, labels = vectors
    task = Embedding()
    first, second = (task.values(one, labels) for one in (exact, near))
    hits = [labels[nearest(one)] == labels for one in (exact, near)]
    assert task.noise(first, second) == pytest.approx(100 * np.sqrt((hits[0] != hits[1]).sum() + 1) / COUNT)
    lost = int((hits[0] & ~hits[1]).sum() - (hits[1] & ~hits[0]).sum())
    assert task.worse(first, task.values(np.roll(exact, 1, 0), labels), 2.0).endswith(" samples")
    assert (task.worse(first, second, 0.0) != "") == (lost > 0)


def test_the_loss_is_that_of_a_neighbour_drawn_at_random() -> None:
    draw = np.random.default_rng(1)
    outputs, labels = draw.normal(size=(7, 4)), np.array([0, 0, 1, 1, 1, 2, 0])  # class 2 has one sample
    rows = outputs / np.linalg.norm(outputs, axis=1, keepdims=True)
    wanted = []
    for i in (0, 1, 2, 3, 4, 6):
        weights = {j: np.exp(rows[i] @ rows[j] / 0.1) for j in range(7) if j != i}
        same = sum(weight for j, weight in weights.items() if labels[j] == labels[i])
        wanted.append(-np.log(same / sum(weights.values())))
    given = torch.from_numpy(outputs).requires_grad_()
    loss = Embedding().loss(given, torch.from_numpy(labels), ScheduleConfig())
    assert loss.item() == pytest.approx(np.mean(wanted), rel=1e-5)
    loss.backward()
    assert given.grad is not None and torch.isfinite(given.grad).all() and given.grad.abs().sum() > 0


def test_a_batch_without_partners_teaches_nothing() -> None:
    given = torch.randn(3, 4, requires_grad=True)
    loss = Embedding().loss(given, torch.tensor([0, 1, 2]), ScheduleConfig())
    loss.backward()
    assert float(loss) == 0 and given.grad is not None and not given.grad.any()


def test_distillation_looks_at_directions_alone() -> None:
    teacher = torch.randn(5, 4)
    assert float(Embedding().distillation(3 * teacher, teacher, 1.0)) == pytest.approx(0, abs=1e-6)
    assert float(Embedding().distillation(-teacher, teacher, 1.0)) == pytest.approx(2, abs=1e-6)


def test_two_ways_to_compute_a_vector_agree_by_cosine(vectors: Vectors) -> None:
    exact, near, _ = vectors
    task = task_of("embedding")
    output = Output(1, task.rule)
    output.add(exact, [near])
    norms = [np.linalg.norm(one.astype(np.float64), axis=1) for one in (exact, near)]
    wanted = ((exact.astype(np.float64) * near).sum(1) / norms[0] / norms[1] >= 0.99).mean()
    assert output.comparisons(1.0)[0].agreement == pytest.approx(wanted)


def test_labels_need_a_class_with_two_samples() -> None:
    task = Embedding()
    assert task.check_targets("test", ("a", "b"), [0, 1]).startswith(
        "at least one class of test must have two"
    )
    assert task.check_targets("test", ("a", "b"), [0, 1, 1]) == "" == task.check_targets("test", (), [-1, -1])
    assert task.check_targets("test", ("a", "b"), [0, 2]) == "labels of test must be 0..1, but they are 0..2"
