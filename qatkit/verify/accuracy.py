"""Computes a task's metrics over labelled images, for an ONNX file in ONNX Runtime or a module in PyTorch.

Both use the same meter, so the figures of the simulation and of the file differ only because the outputs do.
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

# A function from normalised images [N, C, H, W], or other model inputs (`qatkit_verify.feeds`), to the part
# of all outputs that the task judges, [N, ...] (`Task.joined`). There is one for each file or module.
Predictor = Callable[[Any], FloatArray]

_VALUES = 4 * 3 * 224 * 224  # maximum number of input values of the images that run together


class NotFiniteError(ConfigError):
    """Raised when an output is NaN or infinite."""


def accuracy(
    session: ort.InferenceSession, batches: Batches, progress: bool = False, *, task: Task = CLASSIFICATION
) -> Scores:
    """Returns the scores of an ONNX file.

    Args:
        session: a session of the file.
        batches: the batches, (images, targets).
        progress: whether to show a progress bar.
        task: the task whose metrics are computed.

    Raises:
        ConfigError: there are no images.
        NotFiniteError: an output is NaN or infinite; the message names the file and the image.
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
    """Returns the scores of a PyTorch module (the simulation, the float model), in eval mode on its device.

    Args:
        module: a module, or a predictor.
        batches: the batches, (images, targets).
        progress: whether to show a progress bar.
        name: the module's name in messages; its type by default.
        task: the task whose metrics are computed.

    Raises:
        ConfigError, NotFiniteError: as for `accuracy`.
    """
    name = name or type(module).__name__
    return accuracies({name: predictor(module, task)}, batches, progress, task=task)[name]


class OnAccelerator:
    """A predictor that runs a module on an accelerator asynchronously.

    The results are fetched later, so that the CPU can run other predictors in the meantime.
    """

    def __init__(self, module: nn.Module, task: Task) -> None:
        self.module, self.task = module, task

    def begin(self, images: Any) -> Callable[[], FloatArray]:
        """Launches the kernels on the device and returns a function that waits for the outputs."""
        outputs = device_outputs(self.module, images)
        return lambda: self.task.joined([one.cpu().numpy() for one in outputs])

    def __call__(self, images: Any) -> FloatArray:
        return self.begin(images)()


def file_predictor(session: ort.InferenceSession, task: Task = CLASSIFICATION) -> Predictor:
    """Returns a predictor that runs a file."""
    return lambda images: task.joined(run_outputs(session, images))


def predictor(model: nn.Module | Predictor, task: Task = CLASSIFICATION) -> Predictor:
    """Returns a predictor that runs a module in eval mode on its device; returns any function unchanged."""
    torch = sys.modules.get("torch")  # torch has already been imported if a module exists
    if torch is not None and isinstance(model, torch.nn.Module):
        if device_of(model).type != "cpu":
            return OnAccelerator(model, task)
        return lambda images: task.joined(module_outputs(model, images))
    return model


def all_outputs(model: nn.Module | Predictor) -> Callable[[Any], Sequence[Array]]:
    """Returns a function that computes every output of `model`.

    This works for a module and for an object with a method `outputs`. Any other function yields a single
    output.
    """
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
    """Returns the scores of each predictor from a single pass over the images.

    Predictors on an accelerator compute in parallel with those on the CPU.

    Args:
        predictors: the predictors by name.
        batches: the batches, (images, targets).
        progress: whether to show a progress bar.
        task: the task whose metrics are computed.
        values: lists by predictor name that receive each batch's per-image contributions to the main metric.

    Raises:
        ConfigError, NotFiniteError: as for `accuracy`.
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
    """Returns a predictor that runs `predict` on as many images at a time as fit the caches.

    The predictor of an accelerator is returned unchanged. The number of images follows a fixed rule and is
    not timed, so that two runs add the same floats in the same order (figures:
    docs/decisions/0033-several-processes.md).
    """
    if isinstance(
        predict, OnAccelerator
    ):  # an accelerator has other caches, and is faster with larger batches
        return predict
    return lambda images: np.concatenate([predict(part) for part in parts(images)])


def parts(images: Any) -> Iterator[Any]:
    """Yields a single-tensor batch a few images at a time; yields any other batch unchanged."""
    shape = getattr(images, "shape", ())
    size = max(1, _VALUES // math.prod(shape[1:])) if len(shape) > 1 else 0
    if not size or size >= len(images):
        yield images
        return
    for start in range(0, len(images), size):
        yield images[start : start + size]


def all_cores() -> int:
    """Returns the number of threads for a pass over images: one for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Count:
    """A running score of one predictor, updated batch by batch."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.meter, self.sample = name, task.meter(), task.names.sample

    def add(self, outputs: FloatArray, targets: Any) -> None:
        finite = np.isfinite(outputs)
        if not finite.all():
            image = self.meter.images + int(np.nonzero(~finite.reshape(len(outputs), -1).all(axis=1))[0][0])
            raise NotFiniteError(
                "file or module", self.name, reason=f"its output for {self.sample} {image} is NaN or infinite"
            )
        self.meter.add(outputs, targets)

    def result(self) -> Scores:
        if not self.meter.images:
            raise ConfigError("data.test_images", 0, "at least one labelled sample to measure accuracy")
        return self.meter.result()
