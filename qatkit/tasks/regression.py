"""The task of predicting numbers: outputs and targets [N] or [N, K] in the same unit.

The main metric is the mean absolute error in that unit, averaged over the K numbers. The loss and the
agreement with float are relative to the standard deviation of the training targets, so they do not depend on
the unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from qatkit.tasks.base import NO_TARGET, Meter, Task
from qatkit.tasks.decisions import undecided
from qatkit_verify.records import Metric, Scores, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array

TOLERANCE = 0.05  # share of the targets' standard deviation within which two models agree


class Regression(Task):
    """Regression with MAE, RMSE and smooth L1.

    Two models agree if they differ by at most 5 % of the targets' standard deviation.

    Args:
        deviations: the standard deviation of each of the K numbers over the training targets; empty until
            these are known (`of_data`).
    """

    names = TaskNames(
        "regression",
        "regression",
        (
            Metric("MAE", unit="", higher_is_better=False),
            Metric("RMSE", unit="", higher_is_better=False),
        ),
        decision=f"value within {100 * TOLERANCE:g} % of the targets' deviation",
        outputs="values",
        compared="values within a step",
        samples="samples",
    )
    augmentations: ClassVar[Sequence[str] | None] = None

    def __init__(self, deviations: Sequence[float] = ()) -> None:
        self.deviations = tuple(deviations)

    def of_data(self, targets: Sequence[Any]) -> Task:
        import numpy as np

        if not self.labelled((), targets):
            return self
        return type(self)(columns(np.asarray(targets)).std(0).tolist())

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        """Returns the smooth L1 loss of the errors, measured in standard deviations of the targets.

        Source: Girshick, "Fast R-CNN", 2015, section 2.3.
        """
        from torch.nn import functional as F

        found, wanted = self._scaled(output), self._scaled(targets.to(output.device))
        return F.smooth_l1_loss(found, wanted)

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        from torch.nn import functional as F

        return F.smooth_l1_loss(self._scaled(output), self._scaled(teacher))

    def _scaled(self, values: Tensor) -> Tensor:
        import torch

        rows = values.float().reshape(len(values), -1)
        return rows / torch.tensor(self.deviations or (1.0,), device=rows.device)

    def values(self, outputs: Array, targets: Any) -> Array:
        import numpy as np

        found: Array = np.abs(_errors(outputs, targets)).mean(1)
        return found

    def meter(self) -> Meter:
        return _Meter(self)

    def decision(self, outputs: Array) -> Array:
        """Returns the outputs in units of the tolerance, rounded to integers."""
        import numpy as np

        whole: Array = np.rint(columns(outputs) / self._tolerances(outputs)).astype(np.int64)
        return whole

    def agree(self, exact: Array, found: Array) -> Array:
        import numpy as np

        near = np.abs(_errors(found, exact)) <= self._tolerances(exact)
        return np.asarray(near.all(1))

    def _tolerances(self, outputs: Array) -> Array:
        """Returns the tolerance of each number: 5 % of the standard deviation of the targets.

        If the deviations of the targets are unknown, those of `outputs` are used.
        """
        import numpy as np

        deviations = np.asarray(self.deviations) if self.deviations else columns(outputs).std(0)
        found: Array = TOLERANCE * np.maximum(deviations, 1e-30)
        return found

    @property
    def rule(self) -> Callable[[Array], Any]:
        """The rule that two outputs agree where their values are less than a quantization step apart."""
        return undecided

    def target(self, value: Any) -> Any:
        """Returns a number, or a tuple for a list of numbers; `NO_TARGET` is returned unchanged."""
        if isinstance(value, int) and value == NO_TARGET:
            return NO_TARGET
        numbers = value.tolist() if hasattr(value, "tolist") else value
        several = isinstance(numbers, list | tuple)
        try:
            found = tuple(map(float, numbers)) if several else (float(numbers),)
        except (TypeError, ValueError) as error:
            raise TypeError("targets must be numbers, or lists of numbers") from error
        if not found or not all(map(math.isfinite, found)):
            raise ValueError("targets must be one or more finite numbers")
        return found if several else found[0]

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        if not self.labelled(classes, targets):
            return ""
        kinds = {len(one) if isinstance(one, tuple) else 0 for one in targets}
        if len(kinds) > 1:
            found = " and ".join(f"lists of {kind}" if kind else "single numbers" for kind in sorted(kinds))
            return f"targets of {part} must all have the same number of values, but there are {found}"
        for place, column in enumerate(zip(*map(_tuple, targets), strict=True)):
            if part == "train" and len(set(column)) == 1:
                which, are = (f"value {place} of the targets", "is") if any(kinds) else ("targets", "are")
                return f"{which} of {part} must differ between samples, but {are} always {column[0]:g}"
        return ""

    def width(self, classes: Sequence[str]) -> int | None:
        return len(self.deviations) or None

    def width_of(self, shape: Sequence[int]) -> int | None:
        return 1 if len(shape) == 1 else super().width_of(shape)

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        if len(shape) == 1:
            return shape[0] == images and width in (None, 1)
        return len(shape) == 2 and shape[0] == images and width in (None, shape[1])

    def shape_text(self, width: int | None) -> str:
        return "[N, values]" if width is None else f"[N, {width}], one value for each number of a target"


def columns(values: Array) -> Array:
    """Returns the numbers of each sample, float64 [N, K], from [N] or [N, K]."""
    import numpy as np

    found: Array = np.asarray(values, np.float64).reshape(len(values), -1)
    return found


def _errors(outputs: Array, targets: Any) -> Array:
    difference: Array = columns(outputs) - columns(targets)
    return difference


def _tuple(target: Any) -> tuple[float, ...]:
    return target if isinstance(target, tuple) else (target,)


class _Meter:
    """A meter that sums up absolute and squared errors.

    Attributes:
        images: number of samples seen so far.
    """

    def __init__(self, task: Regression) -> None:
        self.images, self._task = 0, task
        self._absolute = self._squared = 0.0

    def add(self, outputs: Array, targets: Any) -> None:
        """Adds a batch of outputs and targets, [N] or [N, K]."""
        errors = _errors(outputs, targets)
        self._absolute += float(abs(errors).mean(1).sum())
        self._squared += float((errors**2).mean(1).sum())
        self.images += len(errors)

    def result(self) -> Scores:
        """Returns the scores; at least one sample must have been added."""
        absolute, root = self._task.names.metrics
        means = self._absolute / self.images, math.sqrt(self._squared / self.images)
        return Scores((absolute.of(means[0]), root.of(means[1])), self.images)
