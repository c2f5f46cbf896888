"""The interface of tasks, which tells data, training, verification and reports what a model is for.

    data      target, group, collate, augmentations     the target of an item, and batches of targets
              of_data                                   statistics of all targets
    model     width, fits                               the required outputs of the model
    training  loss, distillation, total, figure         the loss to minimize, and the figure of an epoch
    judging   values, meter, decision, divergence       quality of a file per image, and distance from float
    report    names, drawing                            names of metrics and outputs, and drawings of samples

A task is one class in one file. It must define `names`, `loss`, `values` and `decision`. The other methods
have defaults, which suit a task whose main metric is the mean of one value per image. Outputs are the model's
first output, or what `joined` returns for all outputs. Methods for training get tensors and may import torch.
The other methods get NumPy arrays, since reports and verification do not depend on torch. The command line
loads tasks by name, so torch and NumPy are imported only inside the methods that compute.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from qatkit_verify.records import Scores, TaskNames

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.drawing import Drawing
    from qatkit_verify.compare import Alike

    Array = NDArray[Any]

NO_TARGET = -1  # the target of an image without a target
AUXILIARY_WEIGHT = 0.3


class Meter(Protocol):
    """A streaming metric that adds up batches.

    Attributes:
        images: number of images seen so far.
    """

    images: int

    def add(self, outputs: Array, targets: Any) -> None:
        """Adds a batch of finite outputs [N, ...] and their targets."""

    def result(self) -> Scores:
        """Returns the scores over all batches; at least one image must have been added."""


class Agreement(ABC):
    """A streaming count of how often two models make the same decision."""

    @abstractmethod
    def add(self, exact: Array, found: Array) -> None:
        """Adds the outputs of both models for one batch, as returned by `Task.joined`."""

    @property
    @abstractmethod
    def share(self) -> float:
        """The share of equal decisions, 0..1."""

    @property
    def remark(self) -> str:
        """A short remark on the decisions for reports; "" for none."""
        return ""

    @property
    def doubt(self) -> str:
        """A clause that says why the share is meaningless; "" if it is meaningful."""
        return ""


class Task(ABC):
    """The base class of tasks; a task is built without arguments.

    Attributes:
        names: names of metrics, decisions and outputs; the first metric is the main one.
        augmentations: the values of `data.augment` that keep the targets valid; None if all do.
        maps: whether targets are label maps, which are transformed like their images. A target identifies the
            map that the dataset's `label_map(target)` returns; a batch of maps is int64 [N, height, width].
        boxes: whether targets are boxes in pixels, which are transformed like their images; a batch of boxes
            is float32 [N, n, 6] (`qatkit.data.box_targets`).
        every_output: whether distillation covers all outputs of a model, not only the first one.
        auxiliary: names of outputs that only training uses, in models that have them in addition to "out".
    """

    names: ClassVar[TaskNames]
    augmentations: ClassVar[Sequence[str] | None] = ("none",)
    maps: ClassVar[bool] = False
    boxes: ClassVar[bool] = False
    every_output: ClassVar[bool] = False
    auxiliary: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        """Returns the training loss, a scalar: the mean loss over a batch of outputs [N, ...]."""

    @abstractmethod
    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns the contribution of each image to the main metric, [N], for comparing models image by image."""

    @abstractmethod
    def decision(self, outputs: Array) -> Array:
        """Returns the decisions on the outputs, integers or booleans [N, ...], to compare with the float model's."""

    def agree(self, exact: Array, found: Array) -> Array:
        """Returns where two models agree, booleans [N, ...]; by default where their decisions are equal."""
        return self.decision(exact) == self.decision(found)  # type: ignore[no-any-return]

    @property
    def rule(self) -> Callable[[Array], Array] | Alike | None:
        """The rule by which `qatkit_verify.compare` decides whether outputs agree; None: by their classes."""
        return self.decision

    def agreement(self) -> Agreement:
        """Returns a new `Agreement`, the figure in reports; by default it is the share of `agree`."""
        return Agreed(self.agree)

    def joined(self, outputs: Sequence[Array]) -> Array:
        """Returns the outputs to compare, float32 [N, ...], from all outputs of a model; by default the first."""
        import numpy as np

        return np.asarray(outputs[0], np.float32)

    def answers(self, outputs: Array) -> Array:
        """Returns targets derived from a teacher's outputs, for data without targets; by default their decisions."""
        return self.decision(outputs)

    def of_samples(self, samples: str) -> Self:
        """Returns the task with another name of the model's inputs, in the plural: "recordings"."""
        made = copy.copy(self)
        made.names = replace(self.names, samples=samples)  # type: ignore[misc]
        return made

    def of_data(self, targets: Sequence[Any]) -> Task:
        """Returns the task for a data set with these training targets; by default itself.

        A task that measures errors relative to the spread of the targets computes that spread here.
        """
        return self

    def suited(self, outputs: Sequence[Array], names: Sequence[str], samples: int) -> Task:
        """Returns the task for a model with these outputs; by default itself.

        Args:
            outputs: all outputs of one batch.
            names: names of the outputs.
            samples: number of samples in the batch.

        Raises:
            ConfigError: the decision does not fit the outputs.
        """
        return self

    def of_model(self, model: Any) -> Task:
        """Returns the task for the training of a model; by default itself.

        Args:
            model: the float model, before any change to it.
        """
        return self

    @property
    def untrainable(self) -> str:
        """A noun phrase for ConfigError: the kind of model that training on targets needs.

        It is "" (the default) if the model of this task (`of_model`) is of that kind.
        """
        return ""

    def trained(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the input of `loss`, `distillation` and `total` from all outputs; by default the first."""
        return outputs[0]

    def whole_loss(
        self, output: Tensor, auxiliary: Sequence[Tensor], targets: Tensor, schedule: ScheduleConfig
    ) -> Tensor:
        """Returns the loss of a step: by default `loss` plus 0.3 times the loss of each auxiliary output.

        Source of the weight: Szegedy et al., "Going deeper with convolutions", 2015, section 5.

        Args:
            output: the result of `trained`.
            auxiliary: the model's outputs that only training uses.
            targets: targets of the batch.
            schedule: settings of the training.
        """
        loss = self.loss(output, targets, schedule)
        for head in auxiliary:
            loss = loss + AUXILIARY_WEIGHT * self.loss(head, targets, schedule)
        return loss

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns the distance between outputs and a teacher's outputs, a scalar.

        By default it is the mean squared error.
        """
        from torch.nn import functional as F

        return F.mse_loss(output.float(), teacher.float())

    def total(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of `values` over a batch, on the device of `output`: a scalar, or another input of `figure`.

        Implementations avoid waiting for the device if possible. Sums are added over batches and processes.
        """
        import torch

        values = self.values(output.float().cpu().numpy(), targets.cpu().numpy())
        return torch.tensor(float(values.sum()), dtype=torch.float64, device=output.device)

    def figure(self, total: Any, images: int) -> Any:
        """Returns the main metric from the sum of `values` over `images` images; by default their mean."""
        return total / images

    def mean(self, values: Array) -> float:
        """Returns the main metric from the `values` of all images."""
        return float(self.figure(float(values.mean(dtype="float64")), 1))

    def meter(self) -> Meter:
        """Returns a new meter of the metrics in `names`; by default only of the main metric."""
        return MeanMeter(self)

    def divergence(self, exact: Array, found: Array) -> float | None:
        """Returns the Kullback-Leibler divergence of `found` from `exact`, [rows, values], summed over rows, in nats.

        It is None (the default) for outputs that do not define a probability distribution.
        """
        return None

    def aligned(self, exact: Sequence[Array], found: Sequence[Array]) -> Sequence[Array]:
        """Returns `found` with its rows in the order of the rows of `exact`; by default unchanged.

        `found` contains the same outputs, computed by another file or model.
        """
        return found

    def power(self, outputs: Array) -> float:
        """Returns the power of the outputs [N, ...] of all images, to which `errors` are relative.

        By default it is the mean square of their deviations from the mean over images.
        """
        return float(((outputs - outputs.mean(0)) ** 2).mean())

    def errors(self, exact: Array, found: Array) -> Array:
        """Returns the mean squared error of each image's outputs, [N], in the unit of `power`."""
        squares: Array = ((found - exact) ** 2).reshape(len(exact), -1).mean(1)
        return squares

    def noise(self, first: Array, second: Array) -> float:
        """Returns the standard error of the difference between two models' main metrics, from their `values`."""
        return math.sqrt(float(((first.astype("float64") - second) ** 2).sum())) / len(first)

    def spread(self, score: float, images: int, values: Array | None) -> float:
        """Returns the standard error of the main metric `score` on `images` images; 0 without their `values`."""
        if values is None:
            return 0.0
        return float(values.astype("float64").std()) / math.sqrt(images)

    def worse(self, first: Array, second: Array, sure: float) -> str:
        """Returns a phrase that says how much worse the second model is, from the `values` of both.

        It is "" if the model is not worse by more than `sure` standard errors.
        """
        difference = second.astype("float64") - first
        lost = float(-difference.sum() if self.names.main.higher_is_better else difference.sum())
        if lost <= sure * math.sqrt(float((difference**2).sum())):
            return ""
        return f"loses {lost / len(first):.3g} {self.names.main.points}".rstrip()

    def drawing(self) -> Drawing | None:
        """Returns the drawing of test samples in the report; None (the default) for no drawing."""
        return None

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        """Returns whether images have targets; by default false only if all targets are `NO_TARGET`."""
        return any(not isinstance(one, int) or one != NO_TARGET for one in targets)

    def target(self, value: Any) -> Any:
        """Returns an image's target as plain Python; by default a number.

        Raises:
            TypeError, ValueError: `value` is not a target; the message is a clause such as "targets must be
                numbers".
        """
        if isinstance(value, int):
            return value
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise TypeError("targets must be numbers") from error

    def check_targets(self, part: str, classes: Sequence[str], targets: Sequence[Any]) -> str:
        """Returns a description of what is wrong with the targets of a split ("train" or "test"); "" if nothing is."""
        return ""

    def group(self, target: Any) -> Hashable:
        """Returns the group of a target; by default all targets are in one group.

        If only some of the images are used, they are chosen evenly from all groups.
        """
        return 0

    def collate(self, targets: Sequence[Any]) -> Tensor:
        """Returns the targets of a batch as one tensor; by default numbers as float32 [N]."""
        import torch

        return torch.tensor(targets, dtype=torch.float32)

    def width(self, classes: Sequence[str]) -> int | None:
        """Returns the number of output values per image, which the model's builder gets as `num_classes`.

        None means that the model itself defines it.
        """
        return None

    def width_of(self, shape: Sequence[int]) -> int | None:
        """Returns the number of values per image in outputs of this shape; None if it is unknown."""
        return int(shape[1]) if len(shape) == 2 else None

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        """Returns whether outputs for `images` images may have this shape; `width` is None if it is unknown."""
        return len(shape) > 0 and shape[0] == images and (width is None or tuple(shape[1:]) == (width,))

    def shape_text(self, width: int | None) -> str:
        """Returns a description of the required shape of outputs, for messages."""
        return "[N, ...]" if width is None else f"[N, {width}]"


class Agreed(Agreement):
    """The default agreement: the share of equal decisions.

    Args:
        agree: a function such as `Task.agree`.
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
    """A meter of the main metric, from the sum of a task's `values`."""

    def __init__(self, task: Task) -> None:
        self.images, self._task, self._total = 0, task, 0.0

    def add(self, outputs: Array, targets: Any) -> None:
        """Adds a batch of outputs [N, ...] and their targets."""
        import numpy as np

        values = self._task.values(outputs, np.asarray(targets))
        self.images, self._total = self.images + len(values), self._total + float(values.sum())

    def result(self) -> Scores:
        """Returns the main metric; at least one image must have been added."""
        main = self._task.names.main
        return Scores((main.of(float(self._task.figure(self._total, self.images))),), self.images)
