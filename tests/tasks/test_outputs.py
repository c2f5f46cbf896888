"""Tests of the task for arbitrary outputs: its decisions, how they are guessed, and its metric."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qatkit.tasks import task_of
from qatkit.tasks.outputs import Outputs
from qatkit_verify.errors import ConfigError

ROUNDED = "tasks.test_outputs.rounded"
DRAW = np.random.default_rng(0)


def rounded(outputs: NDArray[np.float32]) -> NDArray[np.int64]:
    """A user's decision function."""
    return np.rint(outputs).astype(np.int64)


def too_few(outputs: NDArray[np.float32]) -> NDArray[np.int64]:
    """A wrong decision function, which returns one value for a whole batch."""
    return np.zeros(1, np.int64)


@pytest.mark.parametrize(
    ("decision", "same", "title"),
    [
        ("argmax(-1)", lambda a, b: a.argmax(-1) == b.argmax(-1), "top-1 class"),
        ("argmax(1)", lambda a, b: a.argmax(1) == b.argmax(1), "index of the largest value along axis 1"),
        ("threshold(0.25)", lambda a, b: (a > 0.25) == (b > 0.25), "side of the threshold 0.25"),
        (ROUNDED, lambda a, b: np.rint(a) == np.rint(b), f"result of {ROUNDED}"),
    ],
)
def test_agreement_is_by_the_decision(
    decision: str, same: object, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("tests")
    exact, found = DRAW.normal(size=(2, 5, 4, 3)).astype(np.float32)
    task = task_of("outputs", decision).suited([exact], ["scores"], 5)
    np.testing.assert_array_equal(task.agree(exact, found), same(exact, found))  # type: ignore[operator]
    assert task.names.decision == title


@pytest.mark.parametrize(
    ("outputs", "decision"),
    [
        (np.array([[0.2, 0.8], [0.5, 0.5]]), "argmax(1)"),
        (np.array([[0.2], [0.9]]), "threshold(0.5)"),
        (np.array([[0.2, 0.9], [0.5, 0.5]]), "cosine"),
        (np.array([[-1.0, 2.0]]), "cosine"),
        (np.full((2, 4, 4), 0.25), "cosine"),  # perhaps a class per step
        (np.full((2, 4, 3, 5), 0.25), "mask"),
        (np.full((2, 4, 1, 1), 0.25), "cosine"),
        (np.full((2, 1, 3, 5), 0.25), "cosine"),  # perhaps a picture
        (np.array([0.1, 0.9]), "cosine"),
    ],
)
def test_a_decision_is_guessed_where_there_is_no_doubt(outputs: NDArray[np.float64], decision: str) -> None:
    suited = task_of("outputs").suited([outputs], ["scores"], len(outputs))
    titles = {
        "argmax(1)": "top-1 class",
        "threshold(0.5)": "side of the threshold 0.5",
        "cosine": "outputs (cosine of at least 0.99)",
        "mask": "classes of pixels",
    }
    assert suited.names.decision == titles[decision]


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ("softmax", r"expected auto, argmax\(AXIS\), threshold"),
        (
            "argmax(4)",
            r"expected axis 1 of .*; the model returns 'scores' \[2, 3\] for a batch of 2, which suits argmax",
        ),
        ("argmax(0)", "expected axis 1"),
        ("argmax(x)", "expected an integer for axis"),
        ("argmax(1.5)", "expected an integer for axis"),
        (
            "argmax(1,2)",
            r"expected argmax\(AXIS\) or argmax\(NAME=VALUE, ...\) with each NAME once, from axis",
        ),
        ("threshold(high)", "expected a number for limit"),
        ("threshold(nan)", "expected a number for limit"),
        ("cosine(2)", "expected a number from 0 to 1 for least"),
        ("boxes(score=1.5)", "expected a number from 0 to 1 for score"),
        ("boxes(scor=0.5)", "with each NAME once, from score, iou, nms, layout"),
        ("boxes(score=0.5,score=0.4)", "each NAME once"),
        ("boxes(strides=8,16)", "each NAME once"),
        ("boxes(strides=8-16)", "expected auto, none or strides, such as 8/16/32 for strides"),
        ("boxes(layout=ssd)", "expected one of auto, objectness, classes, pair, final for layout"),
        ("boxes(score=0.3", "expected auto, argmax"),
        ("boxes", r"expected outputs \[N, boxes, 4 \+ 1 \+ classes\]"),
        ("strings", r"expected a first output \[N, steps, classes\]"),
        ("mask", r"expected a first output \[N, H, W\]"),
        ("tasks.test_outputs.too_few", r"returns int64 \[1\]"),
        ("no.such.function", "verify.decision=no.such.function"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(
    decision: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("tests")
    with pytest.raises(ConfigError, match=message):
        task_of("outputs", decision).suited([np.zeros((2, 3), np.float32)], ["scores"], 2)


def test_a_task_with_its_own_decision_takes_no_other() -> None:
    with pytest.raises(ConfigError, match="expected auto with task=classification"):
        task_of("classification", "argmax(1)")


def test_the_metric_is_the_error_relative_to_floats_outputs() -> None:
    random = np.random.default_rng(0)
    exact = random.normal(2, 5, (16, 4, 3)).astype(np.float32)
    found = exact + random.normal(0, 0.05, exact.shape).astype(np.float32)
    task = Outputs().suited([exact], ["y"], len(exact))
    values = task.values(found, task.answers(exact))
    decibel = 10 * np.log10((exact**2).sum() / ((exact - found) ** 2).sum())
    assert task.mean(values) == pytest.approx(100 * 10 ** (-decibel / 20), rel=1e-4)
    meter = task.meter()
    for part in (slice(0, 5), slice(5, 16)):
        meter.add(found[part], task.answers(exact[part]))
    assert meter.result().main.value == pytest.approx(task.mean(values))
    assert task.names.main.best([0.5, 0.1]) == 0.1
