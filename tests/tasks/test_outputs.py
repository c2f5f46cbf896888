"""What two outputs have the same where they agree."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qatkit.tasks import task_of
from qatkit.tasks.outputs import Outputs
from qatkit_verify.errors import ConfigError

DRAW = np.random.default_rng(0)


def rounded(outputs: NDArray[np.float32]) -> NDArray[np.int64]:
    """A decision of a user's."""
    return np.rint(outputs).astype(np.int64)


def too_few(outputs: NDArray[np.float32]) -> NDArray[np.int64]:
    """Gives one answer for a batch."""
    return np.zeros(1, np.int64)


@pytest.mark.parametrize(
    ("decision", "same"),
    [
        ("argmax(-1)", lambda a, b: a.argmax(-1) == b.argmax(-1)),
        ("argmax(1)", lambda a, b: a.argmax(1) == b.argmax(1)),
        ("threshold(0.25)", lambda a, b: (a > 0.25) == (b > 0.25)),
        ("tasks.test_outputs.rounded", lambda a, b: np.rint(a) == np.rint(b)),
    ],
)
def test_agreement_is_by_the_decision(decision: str, same: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("tests")
    exact, found = DRAW.normal(size=(2, 5, 4, 3)).astype(np.float32)
    task = task_of("outputs", decision).suited(exact)
    np.testing.assert_array_equal(task.agree(exact, found), same(exact, found))  # type: ignore[operator]
    assert task.names.decision == f"decisions, {decision}"


@pytest.mark.parametrize(
    ("outputs", "decision"),
    [
        (np.array([[0.2, 0.8], [0.5, 0.5]]), "argmax(1)"),
        (np.array([[0.2], [0.9]]), "threshold(0.5)"),
        (np.array([[0.2, 0.9], [0.5, 0.5]]), "cosine"),
        (np.array([[-1.0, 2.0]]), "cosine"),
        (np.full((2, 3, 4), 0.25), "cosine"),
        (np.array([0.1, 0.9]), "cosine"),
    ],
)
def test_a_decision_is_guessed_where_there_is_no_doubt(outputs: NDArray[np.float64], decision: str) -> None:
    suited = task_of("outputs").suited(outputs)
    assert isinstance(suited, Outputs) and suited.asked == decision


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ("softmax", "expected auto, cosine, argmax"),
        ("argmax(4)", r"expected a decision on outputs \[2, 3\]"),
        ("tasks.test_outputs.too_few", r"gives int64 \[1\]"),
        ("no.such.function", "verify.decision=no.such.function"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(
    decision: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("tests")
    with pytest.raises(ConfigError, match=message):
        task_of("outputs", decision).suited(np.zeros((2, 3), np.float32))


def test_a_task_with_its_own_decision_takes_no_other() -> None:
    with pytest.raises(ConfigError, match="expected auto with task=classification"):
        task_of("classification", "argmax(1)")
