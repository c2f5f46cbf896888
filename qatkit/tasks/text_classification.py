"""The task of classifying texts: logits [N, classes] against labels [N].

texts or pairs of texts, as tokens [N, T] ── model ──> logits [N, classes] ── argmax ──> class
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qatkit.tasks.base import Meter
from qatkit.tasks.classification import Classification
from qatkit_verify.classification import Counted
from qatkit_verify.records import Metric, Scores, TaskNames

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qatkit.tasks.base import Array


class TextClassification(Classification):
    """Classification of texts with accuracy and macro F1.

    Two models agree if they predict the same class.
    """

    names = TaskNames(
        "text_classification",
        "text classification",
        (Metric("accuracy"), Metric("macro F1")),
        decision="class",
        outputs="logits",
        samples="texts",
    )
    augmentations = ("none",)

    def meter(self) -> Meter:
        return _Meter(self.names)


class _Meter:
    """A streaming meter that counts correct answers and adds up the confusion matrix.

    Attributes:
        images: number of texts seen so far.
    """

    def __init__(self, names: TaskNames) -> None:
        self.images, self._names, self._counted = 0, names, Counted()
        self._pairs: NDArray[Any] | None = None  # [classes, classes]: label, decision

    def add(self, outputs: Array, targets: Any) -> None:
        """Adds a batch of logits [N, classes] and labels [N]."""
        import numpy as np

        classes, labels = outputs.shape[1], np.asarray(targets)
        places = labels * classes + outputs.argmax(1)
        found = np.bincount(places, minlength=classes**2).reshape(classes, classes)
        self._pairs = found if self._pairs is None else self._pairs + found
        self._counted.add(outputs, labels)
        self.images += len(labels)

    def result(self) -> Scores:
        """Returns the scores; F1 covers the classes that occur as labels or as decisions.

        At least one text must have been added.
        """
        counted, pairs = self._counted.result(), self._pairs
        assert pairs is not None
        seen = pairs.sum(0) + pairs.sum(1)
        f1 = (2 * pairs.diagonal()[seen > 0] / seen[seen > 0]).mean()
        accuracy, macro = self._names.metrics
        metrics = (accuracy.of(counted.score), macro.of(100 * float(f1)))
        return Scores(metrics, self.images, counted.class_images, counted.class_right)
