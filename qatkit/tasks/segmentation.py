"""The task of classifying pixels: logits [N, classes, height, width] against label maps [N, height, width].

The main metric is the intersection over union, averaged over classes. Intersections and unions are summed
over all images before they are divided. The standard error of a difference uses paired images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from qatkit.tasks.base import NO_TARGET, Meter
from qatkit.tasks.influence import ByInfluence
from qatkit.tasks.logits import Logits
from qatkit_verify.errors import ConfigError
from qatkit_verify.records import Metric, Scores, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array
    from qatkit.tasks.drawing import Drawing

IGNORED = 255  # a label that counts neither as right nor as wrong (`qatkit.data.label_pictures`)


class Segmentation(ByInfluence, Logits):
    """Segmentation with mIoU and pixel accuracy.

    Two models agree on a pixel if its likeliest class is the same.
    """

    names = TaskNames(
        "segmentation",
        "image segmentation",
        (Metric("mIoU"), Metric("pixel accuracy")),
        decision="class of a pixel",
        outputs="logits",
    )
    augmentations: ClassVar[Sequence[str] | None] = None
    maps = True
    auxiliary: ClassVar[Sequence[str]] = ("aux",)

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        """Returns the mean cross entropy of all labelled pixels; 0 for a batch without labelled pixels."""
        from torch.nn import functional as F

        targets = _fitting(output, targets).to(output.device)
        total = F.cross_entropy(
            output.float(),
            targets,
            ignore_index=IGNORED,
            label_smoothing=schedule.label_smoothing,
            reduction="sum",
        )
        return total / (targets != IGNORED).sum().clamp(min=1)

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns T² times the KL divergence of the softmaxes at temperature T, averaged over all pixels.

        Source: Hinton et al., "Distilling the knowledge in a neural network", 2015.
        """
        from torch.nn import functional as F

        mine, wanted = ((one.float() / temperature).log_softmax(1) for one in (output, teacher))
        return temperature**2 * F.kl_div(mine, wanted, log_target=True, reduction="none").sum(1).mean()

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns intersections and unions of a batch, [2, classes]."""
        import torch

        classes = output.shape[1]
        targets = _fitting(output, targets).to(output.device)
        counted = targets != IGNORED
        found, wanted = output.argmax(1)[counted], targets[counted]
        sizes = [torch.bincount(one, minlength=classes) for one in (found, wanted, wanted[found == wanted])]
        return torch.stack([sizes[2], sizes[0] + sizes[1] - sizes[2]])

    def figure(self, total: Any, images: int) -> Any:
        """Returns the mean intersection over union in percent, from sums [2, classes].

        The mean is over the classes that occur; it is 0 if none does.
        """
        shared, joined = total
        seen = joined > 0
        return 100 * (shared[seen] / joined[seen]).mean() if seen.any() else 0 * joined.sum()

    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns intersections and unions of each image, int64 [N, 2, classes]."""
        import numpy as np

        maps = np.asarray(targets)
        _fitting(outputs, maps)
        pairs = _confusions(outputs, maps)
        shared = pairs.diagonal(0, 1, 2)
        return np.stack([shared, pairs.sum(1) + pairs.sum(2) - shared], 1)

    def mean(self, values: Array) -> float:
        return float(self.figure(values.sum(0, dtype="int64"), len(values)))

    def meter(self) -> Meter:
        return _Meter(self)

    def influence(self, values: Array) -> Array:
        """Returns (i - r u) / mean(u), averaged over classes, [N].

        i and u are the intersection and union of a class in an image, and r is its IoU over all images.
        """
        import numpy as np

        shared, joined = values[:, 0].astype(np.float64), values[:, 1].astype(np.float64)
        seen = joined.sum(0) > 0
        shared, joined = shared[:, seen], joined[:, seen]
        ratio = shared.sum(0) / joined.sum(0)
        found: Array = ((shared - ratio * joined) / joined.mean(0)).mean(1)
        return found

    def drawing(self) -> Drawing:
        from qatkit.tasks.class_maps import ClassMaps

        return ClassMaps()

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        return bool(classes)

    def target(self, value: Any) -> Any:
        if isinstance(value, (int, str)):
            return value
        raise TypeError("targets must be integers or names that label_map(target) turns into maps")

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        without = [one for one in targets if one == NO_TARGET]
        mixed = 0 < len(without) < len(targets)
        return f"either all images of {part} or none of them must have labels" if mixed else ""

    def width(self, classes: Sequence[str]) -> int | None:
        return len(classes) or None

    def width_of(self, shape: Sequence[int]) -> int | None:
        return int(shape[1]) if len(shape) == 4 else None

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        return len(shape) == 4 and shape[0] == images and width in (None, shape[1])

    def shape_text(self, width: int | None) -> str:
        return f"[N, {'classes' if width is None else width}, height, width], a class for each pixel"


def _fitting(outputs: Any, maps: Any) -> Any:
    """Checks that the maps fit the outputs, and returns the maps.

    Raises:
        ConfigError: the outputs have another height or width.
    """
    own, wanted = (" x ".join(map(str, one.shape[-2:])) for one in (outputs, maps))
    if own != wanted:
        needed = f"the model's logits must have the height and width of the label maps ({wanted}), not {own}"
        raise ConfigError("task", "segmentation", reason=needed)
    return maps


def _confusions(outputs: Array, maps: Array) -> Array:
    """Returns the confusion matrix of the pixels of each image, int64 [N, labels, classes]."""
    import numpy as np

    classes, found = outputs.shape[1], []
    for logits, labels in zip(outputs, maps, strict=True):
        counted = labels != IGNORED
        places = labels[counted].astype(np.int64) * classes + logits.argmax(0)[counted]
        found.append(np.bincount(places, minlength=classes**2).reshape(classes, classes))
    return np.stack(found)


class _Meter:
    """A streaming meter that adds up the confusion matrix.

    Attributes:
        images: number of images seen so far.
    """

    def __init__(self, task: Segmentation) -> None:
        self.images, self._task = 0, task
        self._pairs: Any = None  # [labels, classes]

    def add(self, outputs: Array, targets: Any) -> None:
        """Adds a batch of logits [N, classes, height, width] and maps [N, height, width]."""
        import numpy as np

        pairs = _confusions(outputs, np.asarray(targets)).sum(0)
        self._pairs = pairs if self._pairs is None else self._pairs + pairs
        self.images += len(outputs)

    def result(self) -> Scores:
        """Returns the scores, with the intersection and union of each class in pixels.

        At least one image must have been added.
        """
        pairs = self._pairs
        shared, labelled = pairs.diagonal(), pairs.sum(1)
        joined = labelled + pairs.sum(0) - shared
        union, accuracy = self._task.names.metrics
        metrics = (
            union.of(float(self._task.figure((shared, joined), self.images))),
            accuracy.of(100 * float(shared.sum() / max(1, labelled.sum()))),
        )
        return Scores(metrics, self.images, tuple(map(int, joined)), tuple(map(int, shared)))
