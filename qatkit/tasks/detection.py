"""The task of detecting objects: corners [N, boxes, 4] in pixels of the input, scores [N, boxes, classes].

The main metric is COCO's mean average precision (`average_precision.py`). It is not a mean over pictures, so
its standard errors come from the jackknife over groups of pictures. A detector defines its own loss as the
attribute `criterion`, a function of its training-only outputs and the labelled boxes
(`qatkit.models.detectors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from qatkit.tasks.base import NO_TARGET, Agreement, Meter, Task
from qatkit.tasks.decisions import undecided
from qatkit.tasks.decisions.box_layouts import CORNERS, Layout
from qatkit.tasks.decisions.boxes import BoxRequest, MatchedBoxes
from qatkit_verify.errors import ConfigError
from qatkit_verify.records import Metric, Scores, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array
    from qatkit.tasks.drawing import Drawing

Criterion = Callable[..., Any]
VALUES = 6  # values of a labelled box: class, corners, flag (`average_precision`)
_NEAR = 0.05  # tolerance of a corner as a share of the box's side: the step between COCO's thresholds
_LEAST = 1 / 512  # distance that scores keep from 0 and 1 in a logarithm: half a step of 8 bits
_GROUPS = 20  # groups of pictures, one of which is left out at a time


class Detection(Task):
    """Object detection with mean average precision.

    Two models agree if their boxes match.

    Args:
        criterion: the loss of the trained model: a function of the training-only outputs and the labelled
            boxes [N, n, 6] that returns a scalar.
        unordered: whether rows of boxes have no fixed place in the image (`unordered_boxes`), as in two-stage
            detectors.
    """

    names = TaskNames(
        "detection",
        "object detection",
        (Metric("mAP"), Metric("mAP@0.5"), Metric("overlap of matches")),
        decision="boxes (F1 at IoU 0.5)",
        outputs="detections",
        compared="values within a step",
    )
    augmentations: ClassVar[Sequence[str] | None] = ("none", "flip", "scale_flip")
    boxes = True

    def __init__(self, criterion: Criterion | None = None, unordered: bool = False) -> None:
        self._criterion, self._unordered = criterion, unordered
        self._decision = MatchedBoxes(BoxRequest(), Layout("pair", (0, 1), form=CORNERS))

    def of_model(self, model: Any) -> Task:
        return Detection(getattr(model, "criterion", None), getattr(model, "unordered", self._unordered))

    def suited(self, outputs: Sequence[Array], names: Sequence[str], samples: int) -> Task:
        from qatkit.tasks.unordered_boxes import are_unordered

        scores = outputs[1] if len(outputs) > 1 else None
        return Detection(self._criterion, scores is not None and scores.ndim == 3 and are_unordered(scores))

    @property
    def untrainable(self) -> str:
        if self._criterion is not None:
            return ""
        return (
            "a detector that can be trained on boxes, with `criterion` and `inference_outputs` like those of "
            "qatkit.models.detectors (with schedule.distill=1 and schedule.float_epochs=0, any detector learns from "
            "its float model)"
        )

    def trained(self, outputs: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.cat([outputs[0].float(), outputs[1].float()], 2)

    def whole_loss(
        self, output: Tensor, auxiliary: Sequence[Tensor], targets: Tensor, schedule: ScheduleConfig
    ) -> Tensor:
        """Returns the loss of the model's own criterion.

        Raises:
            ConfigError: the model has no criterion, or returns no training-only outputs for it.
        """
        if self._criterion is None or not auxiliary:
            raise ConfigError("task", "detection", reason=f"training needs {Detection().untrainable}")
        found: Tensor = self._criterion([one.float() for one in auxiliary], targets.to(output.device))
        return found

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        return self.whole_loss(output, (), targets, schedule)

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns the divergence of scores and corners from the teacher's.

        It is divided by the sum over all boxes of the teacher's best score. Scores are treated as
        probabilities of binary decisions. Corners are treated as normal distributions with a standard
        deviation of 0.05 of a side, weighted by the teacher's score. Both terms are quadratic near the
        teacher, where the gradient is small. If rows have no fixed place, each is compared with the teacher's
        `nearest` one, and rows without one are left out.
        """
        import torch
        from torch.nn import functional as F

        total = teacher[..., 4:].amax(2).sum().clamp(min=1)
        if self._unordered:
            from qatkit.tasks.unordered_boxes import nearest

            teacher, same = nearest(output, teacher)
            output, teacher = output[same], teacher[same]
        weights = teacher[..., 4:].amax(-1)
        found, wanted = (one[..., 4:].clamp(_LEAST, 1 - _LEAST) for one in (output, teacher))
        scores = F.binary_cross_entropy(found, wanted, reduction="sum")
        scores = scores - F.binary_cross_entropy(wanted, wanted, reduction="sum")
        sides = (teacher[..., 2:4] - teacher[..., :2]).clamp(min=1)
        sides = torch.cat([sides, sides], -1)
        apart = ((output[..., :4] - teacher[..., :4]) / sides / _NEAR).square().sum(-1) / 2
        loss: Tensor = (scores + (weights * apart).sum()) / total
        return loss

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns counts of labelled boxes and detections by class, threshold and score, which can be added.

        `figure` turns them into an average precision that is exact up to the width of a bin.
        """
        import torch

        from qatkit.tasks.average_precision import histograms

        values = self.values(output.detach().float().cpu().numpy(), targets.cpu().numpy())
        return torch.from_numpy(histograms(values)).to(output.device)

    def figure(self, total: Any, images: int) -> Any:
        import numpy as np

        from qatkit.tasks.average_precision import mean_of_histograms

        counts = np.asarray(total.cpu() if hasattr(total, "cpu") else total, np.float64)
        return mean_of_histograms(counts)

    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns the contribution of each picture, [N, detections + classes, 5] (`picture_values`)."""
        import numpy as np

        from qatkit.tasks.average_precision import detections, picture_values

        classes, truth = outputs.shape[2] - 4, np.asarray(targets, np.float64)
        pairs = zip(outputs, truth, strict=True)
        return np.stack([picture_values(detections(rows), one, classes) for rows, one in pairs])

    def mean(self, values: Array) -> float:
        from qatkit.tasks.average_precision import mean_precision, precisions

        return mean_precision(precisions(values))

    def meter(self) -> Meter:
        return _Meter(self)

    def noise(self, first: Array, second: Array) -> float:
        """Returns the standard error of the difference between two models.

        It comes from the jackknife over groups of the same pictures, and is 0 for fewer than two pictures.

        Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 11.
        """
        import numpy as np

        groups = min(_GROUPS, len(first))
        if groups < 2:
            return 0.0
        group = np.arange(len(first)) % groups
        apart = [self.mean(first[group != one]) - self.mean(second[group != one]) for one in range(groups)]
        return math.sqrt((groups - 1) * float(np.var(apart)))

    def spread(self, score: float, images: int, values: Array | None) -> float:
        if values is None:
            return 0.0
        nothing = values * 0
        nothing[..., 0] = values[..., 0]  # every detection is wrong
        return self.noise(values, nothing)

    def worse(self, first: Array, second: Array, sure: float) -> str:
        lost = self.mean(first) - self.mean(second)
        return f"loses {lost:.3g} points" if lost > sure * self.noise(first, second) else ""

    def decision(self, outputs: Array) -> Array:
        return self._decision.decide(outputs)

    def agree(self, exact: Array, found: Array) -> Array:
        return self._decision.agree(exact, found)

    def agreement(self) -> Agreement:
        return self._decision.agreement()

    @property
    def rule(self) -> Callable[[Array], Any]:
        return undecided

    def joined(self, outputs: Sequence[Array]) -> Array:
        """Returns corners and scores, float32 [N, boxes, 4 + classes]."""
        return self._decision.joined(outputs)

    def aligned(self, exact: Sequence[Array], found: Sequence[Array]) -> Sequence[Array]:
        """Returns `found`, with its boxes in the order of the exact ones if rows have no fixed place."""
        if not self._unordered:
            return found
        import numpy as np

        from qatkit.tasks.unordered_boxes import in_order_of

        ends = np.cumsum([one.shape[2] for one in found])[:-1]
        return np.split(in_order_of(*(np.concatenate(one, 2) for one in (exact, found))), ends, 2)

    def errors(self, exact: Array, found: Array) -> Array:
        """Returns the mean squared error of the scores, plus that of the corners, [N].

        Errors of corners are relative to the sides of a box and weighted by the square of its best score.
        """
        (found,) = self.aligned([exact], [found])
        scores = ((found[..., 4:] - exact[..., 4:]) ** 2).sum(2)
        sides = (exact[..., 2:4] - exact[..., :2]).clip(min=1).prod(2)
        places = ((found[..., :4] - exact[..., :4]) ** 2).mean(2) / sides
        errors: Array = (scores + exact[..., 4:].max(2) ** 2 * places).mean(1)
        return errors

    def power(self, outputs: Array) -> float:
        return float((outputs[..., 4:] ** 2).sum(2).mean())

    def answers(self, outputs: Array) -> Array:
        """Returns the teacher's boxes with a score above 0.3 as labelled boxes, [N, n, 6]."""
        import numpy as np

        boxes = self._decision.boxes(outputs)
        found = np.full((len(outputs), max([one.count for one in boxes] + [1]), VALUES), -1.0)
        for rows, one in zip(found, boxes, strict=True):
            rows[: one.count] = np.column_stack([one.classes, one.corners, np.zeros(one.count)])
        return found

    def drawing(self) -> Drawing:
        from qatkit.tasks.drawn_boxes import DrawnBoxes

        return DrawnBoxes()

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        return bool(classes)

    def target(self, value: Any) -> Any:
        """Returns labelled boxes as a tuple of (class, x1, y1, x2, y2, flag), in pixels of the picture.

        The flag is 0, `IGNORED` or `CROWD`. `NO_TARGET` is returned unchanged.
        """
        if value == NO_TARGET:
            return value
        try:
            found = tuple((int(one[0]), *map(float, one[1:5]), int(one[5])) for one in value)
        except (TypeError, ValueError, IndexError) as error:
            wanted = "targets must be tuples of boxes (class, x1, y1, x2, y2, flag); flag: 0, 1 (ignored) or 2 (crowd)"
            raise TypeError(wanted) from error
        return found

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        if not classes:
            return ""
        for place, boxes in enumerate(targets):
            if boxes == NO_TARGET:
                return f"image {place} of {part} has no labelled boxes; use () for a picture without objects"
            for label, x1, y1, x2, y2, _ in boxes:
                if not 0 <= label < len(classes):
                    told = f"a box of image {place} of {part} has the class {label}"
                    return f"{told}; classes must be {'0' if len(classes) == 1 else f'0..{len(classes) - 1}'}"
                if not (x1 < x2 and y1 < y2):
                    return f"a box of image {place} of {part} has no area ({x1:g}, {y1:g}, {x2:g}, {y2:g})"
        return "" if any(targets) else f"at least one image of {part} must have a box"

    def group(self, target: Any) -> Any:
        """Returns the sorted classes of a picture's boxes; 0 for a picture without a target."""
        return 0 if target == NO_TARGET else tuple(sorted({box[0] for box in target}))

    def width(self, classes: Sequence[str]) -> int | None:
        return len(classes) or None

    def width_of(self, shape: Sequence[int]) -> int | None:
        return None

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        return len(shape) == 3 and shape[0] == images and shape[2] == 4

    def shape_text(self, width: int | None) -> str:
        scores = f"scores [N, boxes, {'classes' if width is None else width}] within 0..1"
        return f"[N, boxes, 4], corners in pixels of the input, and {scores}"


class _Meter:
    """A meter that keeps the contribution of each picture.

    Attributes:
        images: number of images seen so far.
    """

    def __init__(self, task: Detection) -> None:
        self.images, self._task = 0, task
        self._values: list[Array] = []

    def add(self, outputs: Array, targets: Any) -> None:
        """Adds a batch of rows [N, boxes, 4 + classes] and labelled boxes [N, n, 6]."""
        self._values.append(self._task.values(outputs, targets))
        self.images += len(outputs)

    def result(self) -> Scores:
        """Returns the scores; at least one image must have been added.

        For each class, they contain the number of labelled boxes, and the average precision times this number.
        """
        import numpy as np

        from qatkit.tasks.average_precision import DETECTIONS, OVERLAP, mean_precision, precisions

        values = np.concatenate(self._values)
        found, overlaps = precisions(values), values[:, :DETECTIONS, OVERLAP]
        near = 100 * float(overlaps[overlaps > 0].mean()) if (overlaps > 0).any() else 0.0
        names = self._task.names.metrics
        figures = (mean_precision(found), mean_precision(found[:, 0]), near)
        boxes = values[:, DETECTIONS:, 0].sum(0)
        right = np.nan_to_num(found.mean(1)) * boxes
        metrics = tuple(metric.of(value) for metric, value in zip(names, figures, strict=True))
        return Scores(metrics, self.images, tuple(map(int, boxes)), tuple(map(float, right)))
