"""What a task is: all that data, training, verification and reports need to know of what a model is for.

    data      target, group, collate, augmentations     what an item's target is, and how a batch is made of them
              of_data                                   what the task learns of all targets
    model     width, fits                               what the model has to give
    training  loss, distillation, total, figure         what is minimized, and the figure of an epoch
    judging   values, meter, decision, divergence       how good a file is, image by image, and how near to float
    report    names, drawing                            what all of it is called, and how samples are drawn

A task is one class in one file. It has to say `names`, `loss`, `values` and `decision`; the rest has defaults, which
suit a task whose main metric is the mean of a value for each image. Outputs are the model's first output, or what
`joined` makes of all of them. Methods of training get tensors and may import torch; the others get NumPy arrays, since
reports and verification have no torch. The command line reads a task by its name, so both are imported by what
computes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from qatkit_verify.records import Scores, TaskNames

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.drawing import Drawing
    from qatkit_verify.compare import Alike

    Array = NDArray[Any]

NO_TARGET = -1  # the target of an image that has none
AUXILIARY_WEIGHT = 0.3


class Meter(Protocol):
    """A metric that streams: it takes batches and keeps sums.

    Attributes:
        images: seen so far.
    """

    images: int

    def add(self, outputs: Array, targets: Any) -> None:
        """Takes one batch of finite outputs [N, ...] and their targets."""

    def result(self) -> Scores:
        """Returns the scores of all batches, at least one image."""


class Agreement(ABC):
    """Adds up, batch by batch, how far two models decide the same."""

    @abstractmethod
    def add(self, exact: Array, found: Array) -> None:
        """Takes the outputs of both for one batch, as `Task.joined` gives them."""

    @property
    @abstractmethod
    def share(self) -> float:
        """The share of what was compared that is decided the same, 0..1."""

    @property
    def remark(self) -> str:
        """A remark on the decisions in a few words; "" for none."""
        return ""

    @property
    def doubt(self) -> str:
        """The reason why the share is meaningless, as a clause; "" where it is not."""
        return ""


class Task(ABC):
    """What a model is for. A class without arguments.

    Attributes:
        names: what metrics, decisions and outputs are called; the first metric decides.
        augmentations: the values of `data.augment` that leave the targets true; None: all of them.
        maps: whether targets are maps of labels, which go the way of their images: a target stands for the map that
            the dataset's `label_map(target)` returns, and a batch of them is int64 [N, height, width].
        boxes: whether targets are boxes in pixels of their images, which go the way of these: a batch of them is
            float32 [N, n, 6] (`qatkit.data.box_targets`).
        every_output: whether distillation is over all outputs of a model, or over its first one alone.
        auxiliary: names of outputs that are for training alone where a model has them beside "out".
    """

    names: ClassVar[TaskNames]
    augmentations: ClassVar[Sequence[str] | None] = ("none",)
    maps: ClassVar[bool] = False
    boxes: ClassVar[bool] = False
    every_output: ClassVar[bool] = False
    auxiliary: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        """Returns what training minimizes, a scalar: the mean over a batch of outputs [N, ...]."""

    @abstractmethod
    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns what each image contributes to the main metric, [N]; models are compared image by image with it."""

    @abstractmethod
    def decision(self, outputs: Array) -> Array:
        """Returns what the outputs decide, integers or booleans [N, ...]: what "the same as float" compares."""

    def agree(self, exact: Array, found: Array) -> Array:
        """Returns where two models decide the same, booleans [N, ...]; by default where their decisions are equal."""
        return self.decision(exact) == self.decision(found)  # type: ignore[no-any-return]

    @property
    def rule(self) -> Callable[[Array], Array] | Alike | None:
        """How `qatkit_verify.compare` tells whether two ways to compute an output agree; None: by its class axis."""
        return self.decision

    def agreement(self) -> Agreement:
        """Returns a fresh count of `agree`, which is the figure of reports: by default the share of decisions."""
        return Agreed(self.agree)

    def joined(self, outputs: Sequence[Array]) -> Array:
        """Returns what of all outputs of a model is judged, float32 [N, ...]; by default the first one."""
        import numpy as np

        return np.asarray(outputs[0], np.float32)

    def answers(self, outputs: Array) -> Array:
        """Returns targets that a teacher's outputs stand for where there are none; by default its decisions."""
        return self.decision(outputs)

    def of_data(self, targets: Sequence[Any]) -> Task:
        """Returns the task for a data set with these training targets: by default itself. One that judges by the spread
        of the targets learns it here.
        """
        return self

    def suited(self, outputs: Sequence[Array], names: Sequence[str], samples: int) -> Task:
        """Returns the task for a model that gives such outputs; by default itself.

        Args:
            outputs: all of them, of one batch.
            names: of the outputs.
            samples: in the batch.

        Raises:
            ConfigError: its decision does not fit them.
        """
        return self

    def of_model(self, model: Any) -> Task:
        """Returns the task for the training of a model; by default itself.

        Args:
            model: the float model, before anything is done to it.
        """
        return self

    @property
    def untrainable(self) -> str:
        """The reason why the model of `of_model` can't be trained on targets, as what is expected; "" where it can."""
        return ""

    def trained(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns what of all outputs of a model `loss`, `distillation` and `total` take; by default the first one."""
        return outputs[0]

    def whole_loss(
        self, output: Tensor, auxiliary: Sequence[Tensor], targets: Tensor, schedule: ScheduleConfig
    ) -> Tensor:
        """Returns what a step minimizes: by default `loss`, and that of each auxiliary output at a weight of 0.3.

        Source of the weight: Szegedy et al., "Going deeper with convolutions", 2015, section 5.

        Args:
            output: as `trained` gives it.
            auxiliary: the outputs that a model has for training alone.
            targets: of the batch.
            schedule: of the training.
        """
        loss = self.loss(output, targets, schedule)
        for head in auxiliary:
            loss = loss + AUXILIARY_WEIGHT * self.loss(head, targets, schedule)
        return loss

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns how far outputs are from those of a teacher, a scalar: by default the mean squared error."""
        from torch.nn import functional as F

        return F.mse_loss(output.float(), teacher.float())

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of `values` over a batch, a scalar or what else `figure` takes, on the device of `output`,
        without waiting for it if possible; sums of batches and processes are added.
        """
        import torch

        values = self.values(output.float().cpu().numpy(), targets.cpu().numpy())
        return torch.tensor(float(values.sum()), dtype=torch.float64, device=output.device)

    def figure(self, total: Any, images: int) -> Any:
        """Returns the main metric of a sum of `values` over so many images: by default their mean."""
        return total / images

    def mean(self, values: Array) -> float:
        """Returns the main metric of the `values` of all images."""
        return float(self.figure(float(values.mean(dtype="float64")), 1))

    def meter(self) -> Meter:
        """Returns a fresh meter of the metrics in `names`; by default of the first one alone."""
        return MeanMeter(self)

    def divergence(self, exact: Array, found: Array) -> float | None:
        """Returns the divergence of outputs [rows, values] from the exact ones, summed over rows, in nats; None for
        outputs that are no distribution.
        """
        return None

    def aligned(self, exact: Sequence[Array], found: Sequence[Array]) -> Sequence[Array]:
        """Returns `found`, the same outputs computed in another way, with its rows in the order of those of `exact`;
        by default unchanged.
        """
        return found

    def power(self, outputs: Array) -> float:
        """Returns the mean square of what matters in the outputs [N, ...] of all images, of which errors are shares: by
        default of their deviations from the mean image's.
        """
        return float(((outputs - outputs.mean(0)) ** 2).mean())

    def errors(self, exact: Array, found: Array) -> Array:
        """Returns the mean squared error of each image's outputs [N, ...], [N], as `power` counts it."""
        squares: Array = ((found - exact) ** 2).reshape(len(exact), -1).mean(1)
        return squares

    def noise(self, first: Array, second: Array) -> float:
        """Returns the standard error of the difference of two models in the main metric, from the `values` of both."""
        return math.sqrt(float(((first.astype("float64") - second) ** 2).sum())) / len(first)

    def spread(self, score: float, images: int, values: Array | None) -> float:
        """Returns the standard error of the main metric `score` on so many images with these `values`, if known."""
        if values is None:
            return 0.0
        return float(values.astype("float64").std()) / math.sqrt(images)

    def worse(self, first: Array, second: Array, sure: float) -> str:
        """Returns in words how much worse the `values` of the second model are; "" where they are no worse by `sure`
        standard errors.
        """
        difference = second.astype("float64") - first
        lost = float(-difference.sum() if self.names.main.higher_is_better else difference.sum())
        if lost <= sure * math.sqrt(float((difference**2).sum())):
            return ""
        return f"loses {lost / len(first):.3g} {self.names.main.points}".rstrip()

    def drawing(self) -> Drawing | None:
        """Returns how the report draws a few test samples; by default it draws none."""
        return None

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        """Returns whether images have targets: by default unless all of them are `NO_TARGET`."""
        return any(not isinstance(one, int) or one != NO_TARGET for one in targets)

    def target(self, value: Any) -> Any:
        """Returns an image's target as plain Python; by default a number.

        Raises:
            TypeError, ValueError: it is none; the message ends "targets must be ...".
        """
        if isinstance(value, int):
            return value
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise TypeError("targets must be numbers") from error

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        """Returns what is wrong with all targets of a split ("train" or "test"), in words; "" for nothing."""
        return ""

    def group(self, target: Any) -> Hashable:
        """Returns the group of a target: choices of images are balanced over groups. By default there is one."""
        return 0

    def collate(self, targets: Sequence[Any]) -> Tensor:
        """Returns the targets of a batch as one tensor; by default numbers as float32 [N]."""
        import torch

        return torch.tensor(targets, dtype=torch.float32)

    def width(self, classes: Sequence[str]) -> int | None:
        """Returns how many values a model gives for each image, which its builder gets as `num_classes`; None: the
        model knows.
        """
        return None

    def width_of(self, shape: Sequence[int]) -> int | None:
        """Returns the width of outputs of a shape; None where it is unknown."""
        return int(shape[1]) if len(shape) == 2 else None

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        """Returns whether outputs for so many images may have this shape; `width` None: it is not known."""
        return len(shape) > 0 and shape[0] == images and (width is None or tuple(shape[1:]) == (width,))

    def shape_text(self, width: int | None) -> str:
        """Returns the shape that outputs have, in words."""
        return "[N, ...]" if width is None else f"[N, {width}]"


class Agreed(Agreement):
    """Counts where decisions are equal.

    Args:
        agree: `Task.agree`.
    """

    def __init__(self, agree: Callable[[Array, Array], Array]) -> None:
        self._agree = agree
        self._decided = self._same = 0

    def add(self, exact: Array, found: Array) -> None:
        same = self._agree(exact, found)
        self._decided, self._same = self._decided + same.size, self._same + int(same.sum())

    @property
    def share(self) -> float:
        return self._same / self._decided


class MeanMeter:
    """The mean of a task's `values`."""

    def __init__(self, task: Task) -> None:
        self.images, self._task, self._total = 0, task, 0.0

    def add(self, outputs: Array, targets: Any) -> None:
        """Takes one batch."""
        import numpy as np

        values = self._task.values(outputs, np.asarray(targets))
        self.images, self._total = self.images + len(values), self._total + float(values.sum())

    def result(self) -> Scores:
        """Returns the main metric."""
        main = self._task.names.main
        return Scores((main.of(float(self._task.figure(self._total, self.images))),), self.images)
