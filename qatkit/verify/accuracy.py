"""Top-1 and top-5 over labelled images, of an ONNX file in ONNX Runtime or of a module in PyTorch.

Both go through the same counting, so that "simulated" and "in ONNX Runtime" differ only in who computed the
logits. Ties (common when the output is quantized) go to the lower class index in both.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from qatkit.progress import Batches, shown
from qatkit.records.results import Accuracy
from qatkit.verify.module_outputs import device_of, device_outputs, module_outputs
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array
from qatkit_verify.session import FloatArray, run_images, session_file

if TYPE_CHECKING:
    from torch import nn

# From normalised images [N, C, H, W], or what else a model takes (`qatkit_verify.feeds`), to logits [N, classes]:
# what everything but a file is reduced to.
Predictor = Callable[[Any], FloatArray]

_VALUES = 4 * 3 * 224 * 224  # of the input, of images that are run together


class NotFiniteError(ConfigError):
    """Outputs that are NaN or infinite."""


def accuracy(session: ort.InferenceSession, batches: Batches, progress: bool = False) -> Accuracy:
    """Accuracy of an ONNX file.

    Raises:
        ConfigError: there are no images.
        NotFiniteError: an output is NaN or infinite (names the file and the image).
    """
    name = session_file(session)
    return _measure(lambda images: run_images(session, images), batches, name, progress)


def module_accuracy(
    module: nn.Module | Predictor, batches: Batches, progress: bool = False, name: str | None = None
) -> Accuracy:
    """Accuracy of a PyTorch module (the simulation, the float model), in eval mode, on its own device.

    Args:
        module: a module, or what `predictor` made of one.
        batches: (images, labels).
        progress: whether a bar is shown.
        name: of the module, for messages; by default its type.

    Raises:
        ConfigError: as `accuracy`.
    """
    return _measure(predictor(module), batches, name or type(module).__name__, progress)


class OnAccelerator:
    """A module as a predictor that is begun and asked later: the host has its own passes to run meanwhile."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def begin(self, images: Any) -> Callable[[], FloatArray]:
        """Hands the kernels to the device; what is returned waits for their end."""
        first = device_outputs(self.module, images)[0]
        return lambda: np.asarray(first.cpu().numpy(), np.float32)

    def __call__(self, images: Any) -> FloatArray:
        return self.begin(images)()


def predictor(model: nn.Module | Predictor) -> Predictor:
    """A module as a function of arrays, in eval mode, on its own device; another function stays as it is.

    Of several outputs it gives the first.
    """
    torch = sys.modules.get("torch")  # where there is a module, torch has been imported
    if torch is not None and isinstance(model, torch.nn.Module):
        if device_of(model).type != "cpu":
            return OnAccelerator(model)
        return lambda images: np.asarray(module_outputs(model, images)[0], np.float32)
    return model


def all_outputs(model: nn.Module | Predictor) -> Callable[[Any], Sequence[Array]]:
    """As `predictor`, with every output: of a module, of what has a method `outputs`; else the logits alone."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return lambda batch: module_outputs(model, batch)
    every: Callable[[Any], Sequence[Array]] | None = getattr(model, "outputs", None)
    return every or (lambda batch: (model(batch),))


def accuracies(
    predictors: Mapping[str, Predictor], batches: Batches, progress: bool = False
) -> dict[str, Accuracy]:
    """The accuracy of each, all by one reading of the images; what an accelerator computes, it does beside the others.

    Raises:
        ConfigError: as `accuracy`.
    """
    counts = {name: _Count(name) for name in predictors}
    for pixels, labels in shown(batches, f"accuracy: {', '.join(predictors)}", progress):
        begun = {
            name: one.begin(pixels) for name, one in predictors.items() if isinstance(one, OnAccelerator)
        }
        for name, predict in predictors.items():
            logits = begun[name]() if name in begun else predict(pixels)
            counts[name].add(logits, labels)
    return {name: count.result() for name, count in counts.items()}


def in_parts(predict: Predictor) -> Predictor:
    """`predict`, as many images at a time as caches have room for, whatever the batches that are loaded.

    A rule in place of the clock's choice, so that two runs add the same floats in the same order (figures:
    docs/design.md, D33).
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

    def __init__(self, name: str) -> None:
        self.name = name
        self.images = self.top5 = self.classes = 0
        self.of_class, self.right = Counter[int](), Counter[int]()

    def add(self, logits: FloatArray, labels: Any) -> None:
        truth = np.asarray(labels).reshape(-1, 1)
        if not np.isfinite(logits).all():
            image = self.images + int(np.nonzero(~np.isfinite(logits).all(axis=1))[0][0])
            raise NotFiniteError(
                "onnx file", self.name, reason=f"its output for image {image} is NaN or infinite"
            )
        best = np.argsort(-logits, axis=1, kind="stable")[:, :5]
        self.of_class.update(truth[:, 0].tolist())
        self.right.update(truth[best[:, :1] == truth].tolist())
        self.top5 += int((best == truth).sum())
        self.images, self.classes = self.images + len(truth), logits.shape[1]

    def result(self) -> Accuracy:
        if not self.images:
            raise ConfigError("data.test_images", 0, "at least one labelled image to measure accuracy")
        by_class = (tuple(one[label] for label in range(self.classes)) for one in (self.of_class, self.right))
        top1, top5 = 100 * self.right.total() / self.images, 100 * self.top5 / self.images
        return Accuracy(top1, top5 if self.classes > 5 else None, self.images, *by_class)


def _measure(predict: Predictor, batches: Batches, name: str, progress: bool) -> Accuracy:
    return accuracies({name: predict}, batches, progress)[name]
