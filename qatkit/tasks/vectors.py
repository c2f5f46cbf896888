"""Tasks whose models return vectors without a decision of their own: only their directions are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qatkit.tasks.base import Meter, Task
from qatkit_verify.records import Scores

if TYPE_CHECKING:
    from qatkit.tasks.base import Array
    from qatkit_verify.compare import Alike

ALIKE = 0.99  # minimum cosine at which two models' vectors of a sample count as the same


class Vectors(Task):
    """A task with vectors [N, D] whose metric is computed from all `values` together (`Task.mean`)."""

    def decision(self, outputs: Array) -> Array:
        """Returns whether each value is positive: the bits that a binary index of vectors stores."""
        positive: Array = outputs > 0
        return positive

    def agree(self, exact: Array, found: Array) -> Array:
        return alike(exact, found)

    @property
    def rule(self) -> Callable[[Array], Array] | Alike | None:
        """The rule that outputs agree by their cosine, since vectors have no decision of their own."""
        from qatkit_verify.compare import Alike

        return Alike(alike)

    def meter(self) -> Meter:
        return AllValues(self)

    def power(self, outputs: Array) -> float:
        return float((outputs.astype("float64") ** 2).mean())

    def width_of(self, shape: Sequence[int]) -> int | None:
        return None  # the model itself defines it


def alike(exact: Array, found: Array) -> Array:
    """Returns whether the cosine between two models' vectors is at least `ALIKE`, booleans [N]."""
    import numpy as np

    same: Array = (units(exact) * units(found)).sum(1) >= np.float64(ALIKE)
    return same


def units(outputs: Array) -> Array:
    """Returns the rows [N, D] scaled to length 1, float64."""
    import numpy as np

    rows = np.asarray(outputs, np.float64)
    found: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return found


class AllValues:
    """A meter that computes the metric from the values of all samples.

    Args:
        task: the task that provides `values` and `mean`.

    Attributes:
        images: number of samples seen so far.
    """

    def __init__(self, task: Task) -> None:
        self.images, self._task = 0, task
        self._values: list[Array] = []

    def add(self, outputs: Array, targets: Any) -> None:
        """Adds a batch of outputs [N, ...] and their targets."""
        import numpy as np

        self._values.append(self._task.values(outputs, np.asarray(targets)))
        self.images += len(self._values[-1])

    def result(self) -> Scores:
        """Returns the main metric; at least one sample must have been added."""
        import numpy as np

        main = self._task.names.main
        return Scores((main.of(self._task.mean(np.concatenate(self._values))),), self.images)
