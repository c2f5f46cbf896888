"""Implements classification as far as deployment needs it, in NumPy only: decisions, scores and divergence.

    outputs [N, classes] ── argmax ──> decision [N] ── labels ──> top-1, top-5, by class

Ties (common if the output is quantized) go to the lower class index. `qatkit.tasks.classification` adds the
loss. `NAMES` must be readable without NumPy, so only the functions that compute import NumPy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qatkit_verify.records import Metric, Scores, TaskNames

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOP1, TOP5 = Metric("top-1"), Metric("top-5")
NAMES = TaskNames("classification", "image classification", (TOP1, TOP5), "top-1 class", "logits")


def names_of(report: Mapping[str, Any]) -> TaskNames:
    """Returns the names of a report.json's task; a report without a task is one of classification.

    Raises:
        KeyError, TypeError: the report's record is not a task.
    """
    stored = report.get("task")
    return NAMES if stored is None else TaskNames.from_dict(stored)


def classified(
    top1: float,
    top5: float | None,
    images: int,
    class_images: tuple[int, ...] = (),
    class_right: tuple[int, ...] = (),
) -> Scores:
    """Returns a classifier's scores; top-1 and top-5 are in percent, and top-5 is None below 6 classes."""
    return Scores((TOP1.of(top1), TOP5.of(top5)), images, class_images, class_right)


def decision(outputs: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the index of the largest value along axis 1: [N] for [N, classes], [N, H, W] for [N, classes, H, W].

    For outputs [N], which have no classes, it is 0 in every row.
    """
    found: NDArray[np.int64] = (outputs if outputs.ndim > 1 else outputs[:, None]).argmax(1)
    return found


def divergence(exact: NDArray[np.float64], found: NDArray[np.float64]) -> float:
    """Returns the Kullback-Leibler divergence D(softmax(exact) || softmax(found)) in nats, summed over the rows.

    Both outputs are logits [rows, classes].

    Source: Kullback and Leibler, "On information and sufficiency", 1951.
    """
    import numpy as np

    expected = _log_softmax(exact)
    return float((np.exp(expected) * (expected - _log_softmax(found))).sum())


def _log_softmax(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    shifted = rows - rows.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


class Counted:
    """A counter of correct answers, updated batch by batch.

    Attributes:
        images: the number of images seen so far.
    """

    def __init__(self) -> None:
        self.images = self._top5 = self._classes = 0
        self._of_class, self._right = Counter[int](), Counter[int]()

    def add(self, outputs: NDArray[Any], labels: Any) -> None:
        """Counts one batch: logits [N, classes] and labels [N]."""
        import numpy as np

        truth = np.asarray(labels).reshape(-1, 1)
        best = np.argsort(-outputs, axis=1, kind="stable")[:, :5]
        self._of_class.update(truth[:, 0].tolist())
        self._right.update(truth[best[:, :1] == truth].tolist())
        self._top5 += int((best == truth).sum())
        self.images, self._classes = self.images + len(truth), outputs.shape[1]

    def result(self) -> Scores:
        """Returns the scores; at least one image must have been added."""
        images, right = (
            tuple(one[label] for label in range(self._classes)) for one in (self._of_class, self._right)
        )
        top1, top5 = 100 * self._right.total() / self.images, 100 * self._top5 / self.images
        return classified(top1, top5 if self._classes > 5 else None, self.images, images, right)
