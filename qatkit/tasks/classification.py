"""The task of classifying images: logits [N, classes] against labels [N]."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from qatkit.tasks.base import NO_TARGET, Meter
from qatkit.tasks.logits import Logits
from qatkit_verify import classification
from qatkit_verify.errors import counted

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array


class Classification(Logits):
    """Classification with cross entropy, top-1 and top-5.

    Two models agree if they predict the same class.
    """

    names = classification.NAMES
    augmentations: ClassVar[Sequence[str] | None] = None

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        from torch.nn import functional as F

        return F.cross_entropy(output.float(), targets, label_smoothing=schedule.label_smoothing)

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns T² times the KL divergence of the softmaxes at temperature T, averaged over the images.

        For logits [N, classes, ...], the average includes the further axes, as in cross entropy.

        Source: Hinton et al., "Distilling the knowledge in a neural network", 2015.
        """
        from torch.nn import functional as F

        mine, wanted = (
            (one.float() / temperature).log_softmax(1) for one in (output, teacher)
        )  # float32, even under autocast
        return temperature**2 * F.kl_div(mine, wanted, log_target=True, reduction="none").sum(1).mean()

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output.argmax(1) == targets.to(output.device)).sum()

    def figure(self, total: Any, images: int) -> Any:
        return 100 * total / images

    def values(self, outputs: Array, targets: Any) -> Array:
        right: Array = outputs.argmax(1) == targets
        return right

    def mean(self, values: Array) -> float:
        return 100 * float(values.mean())

    def meter(self) -> Meter:
        return classification.Counted()

    def noise(self, first: Array, second: Array) -> float:
        """Returns the standard error of the difference between two models' main metrics, in percentage points.

        It follows from the number of images that only one of the models classifies correctly. One is added to
        this number, since finding no such image among few images proves little.
        """
        return 100 * math.sqrt(int((first != second).sum()) + 1) / len(first)

    def spread(self, score: float, images: int, values: Array | None) -> float:
        return 100 * math.sqrt(score / 100 * (1 - score / 100) / images)

    def worse(self, first: Array, second: Array, sure: float) -> str:
        lost, won = int((first & ~second).sum()), int((second & ~first).sum())
        if lost - won <= sure * math.sqrt(lost + won):
            return ""
        return f"loses {counted(lost - won, self.names.sample)}"

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        return bool(classes)

    def target(self, value: Any) -> int:
        try:
            return operator.index(value)
        except TypeError as error:
            raise TypeError("labels must be integers") from error

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        low, high = min(targets), max(targets)
        if not classes and (low, high) != (NO_TARGET, NO_TARGET):
            return f"labels of {part} must be {NO_TARGET} if there are no classes, but they are {_span(low, high)}"
        if classes and (low < 0 or high >= len(classes)):
            return f"labels of {part} must be {_span(0, len(classes) - 1)}, but they are {_span(low, high)}"
        return ""

    def group(self, target: Any) -> Hashable:
        return cast(Hashable, target)

    def collate(self, targets: Sequence[Any]) -> Tensor:
        import torch

        return torch.tensor(targets)

    def width(self, classes: Sequence[str]) -> int | None:
        return len(classes) or None

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        if width is None:
            return len(shape) >= 2 and shape[0] == images
        return tuple(shape) == (images, width)

    def shape_text(self, width: int | None) -> str:
        return "[N, classes]" if width is None else f"[N, {width}], one value for each class of the data"


def _span(low: int, high: int) -> str:
    """Returns a range of labels as text: "0..9", or "3" for a single one."""
    return f"{low}..{high}" if low < high else str(low)
