"""The metrics of a task over labelled images, of an ONNX file in ONNX Runtime or of a module in PyTorch.

Both go through the same meter, so that "simulated" and "in ONNX Runtime" differ only in who computed the outputs.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from qatkit.progress import Batches, shown
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.verify.module_outputs import device_of, device_outputs, module_outputs
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array
from qatkit_verify.records import Scores
from qatkit_verify.session import FloatArray, run_outputs, session_file

if TYPE_CHECKING:
    from torch import nn

# From normalised images [N, C, H, W], or what else a model takes (`qatkit_verify.feeds`), to what its task judges of
# all outputs, [N, ...] (`Task.joined`): what files and modules are reduced to.
Predictor = Callable[[Any], FloatArray]

_VALUES = 4 * 3 * 224 * 224  # of the input, of images that are run together


class NotFiniteError(ConfigError):
    """Outputs that are NaN or infinite."""


def accuracy(
    session: ort.InferenceSession, batches: Batches, progress: bool = False, *, task: Task = CLASSIFICATION
) -> Scores:
    """Returns the scores of an ONNX file.

    Raises:
        ConfigError: there are no images.
        NotFiniteError: an output is NaN or infinite (names the file and the image).
    """
    name = session_file(session)
    return accuracies({name: file_predictor(session, task)}, batches, progress, task=task)[name]


def module_accuracy(
    module: nn.Module | Predictor,
    batches: Batches,
    progress: bool = False,
    name: str | None = None,
    *,
    task: Task = CLASSIFICATION,
) -> Scores:
    """Returns the scores of a PyTorch module (the simulation, the float model), in eval mode, on its own device.

    Args:
        module: a module, or what `predictor` made of one.
        batches: (images, targets).
        progress: whether a bar is shown.
        name: of the module, for messages; by default its type.
        task: whose metrics they are.

    Raises:
        ConfigError: as `accuracy`.
    """
    name = name or type(module).__name__
    return accuracies({name: predictor(module, task)}, batches, progress, task=task)[name]


class OnAccelerator:
    """A module as a predictor that is begun and asked later: the host has its own passes to run meanwhile."""

    def __init__(self, module: nn.Module, task: Task) -> None:
        self.module, self.task = module, task

    def begin(self, images: Any) -> Callable[[], FloatArray]:
        """Hands the kernels to the device; what is returned waits for their end."""
        outputs = device_outputs(self.module, images)
        return lambda: self.task.joined([one.cpu().numpy() for one in outputs])

    def __call__(self, images: Any) -> FloatArray:
        return self.begin(images)()


def file_predictor(session: ort.InferenceSession, task: Task = CLASSIFICATION) -> Predictor:
    """A file as a function of arrays."""
    return lambda images: task.joined(run_outputs(session, images))


def predictor(model: nn.Module | Predictor, task: Task = CLASSIFICATION) -> Predictor:
    """A module as a function of arrays, in eval mode, on its own device; another function stays as it is."""
    torch = sys.modules.get("torch")  # where there is a module, torch has been imported
    if torch is not None and isinstance(model, torch.nn.Module):
        if device_of(model).type != "cpu":
            return OnAccelerator(model, task)
        return lambda images: task.joined(module_outputs(model, images))
    return model


def all_outputs(model: nn.Module | Predictor) -> Callable[[Any], Sequence[Array]]:
    """Every output of a module, or of what has a method `outputs`; of another function what it gives."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return lambda batch: module_outputs(model, batch)
    every: Callable[[Any], Sequence[Array]] | None = getattr(model, "outputs", None)
    return every or (lambda batch: (model(batch),))


def accuracies(
    predictors: Mapping[str, Predictor],
    batches: Batches,
    progress: bool = False,
    *,
    task: Task = CLASSIFICATION,
    values: Mapping[str, list[FloatArray]] | None = None,
) -> dict[str, Scores]:
    """Returns the scores of each, by one reading of the images; an accelerator computes beside the others.

    Args:
        predictors: by what they are called.
        batches: (images, targets).
        progress: whether a bar is shown.
        task: whose metrics they are.
        values: of these, takes what each image of a batch contributes to the main metric.

    Raises:
        ConfigError: as `accuracy`.
    """
    counts = {name: _Count(name, task) for name in predictors}
    for pixels, targets in shown(batches, f"accuracy: {', '.join(predictors)}", progress):
        begun = {
            name: one.begin(pixels) for name, one in predictors.items() if isinstance(one, OnAccelerator)
        }
        for name, predict in predictors.items():
            outputs = begun[name]() if name in begun else predict(pixels)
            counts[name].add(outputs, targets)
            if values is not None and name in values:
                values[name].append(np.asarray(task.values(outputs, np.asarray(targets))))
    return {name: count.result() for name, count in counts.items()}


def in_parts(predict: Predictor) -> Predictor:
    """`predict`, as many images at a time as caches have room for, whatever the batches that are loaded.

    A rule in place of the clock's choice, so that two runs add the same floats in the same order (figures:
    docs/decisions/0033-several-processes.md).
    """
    if isinstance(predict, OnAccelerator):  # it has other caches, and is the faster the more it gets at once
        return predict
    return lambda images: np.concatenate([predict(part) for part in parts(images)])


def parts(images: Any) -> Iterator[Any]:
    """A batch of one tensor, a few images at a time; another one as it is."""
    shape = getattr(images, "shape", ())
    size = max(1, _VALUES // math.prod(shape[1:])) if len(shape) > 1 else 0
    if not size or size >= len(images):
        yield images
        return
    for start in range(0, len(images), size):
        yield images[start : start + size]


def all_cores() -> int:
    """How many threads a pass over images gets, whatever the latency is measured with."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Count:
    """Of one predictor, batch by batch."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.meter = name, task.meter()

    def add(self, outputs: FloatArray, targets: Any) -> None:
        finite = np.isfinite(outputs)
        if not finite.all():
            image = self.meter.images + int(np.nonzero(~finite.reshape(len(outputs), -1).all(axis=1))[0][0])
            raise NotFiniteError(
                "onnx file", self.name, reason=f"its output for image {image} is NaN or infinite"
            )
        self.meter.add(outputs, targets)

    def result(self) -> Scores:
        if not self.meter.images:
            raise ConfigError("data.test_images", 0, "at least one labelled image to measure accuracy")
        return self.meter.result()
