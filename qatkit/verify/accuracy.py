"""Top-1 and top-5 over labelled images, of an ONNX file in ONNX Runtime or of a module in PyTorch.

Both go through the same counting, so that "simulated" and "in ONNX Runtime" differ only in who computed the
logits. Ties (common when the output is quantized) go to the lower class index in both.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from qatkit.progress import Batches, shown
from qatkit.verify.module_outputs import module_outputs
from qatkit.verify.results import Accuracy
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array
from qatkit_verify.session import FloatArray, run_images, session_file

if TYPE_CHECKING:
    from torch import nn

# From normalised images [N, C, H, W], or what else a model takes (`qatkit_verify.feeds`), to logits [N, classes]:
# what everything but a file is reduced to.
Predictor = Callable[[Any], FloatArray]


def accuracy(session: ort.InferenceSession, batches: Batches, progress: bool = False) -> Accuracy:
    """Accuracy of an ONNX file.

    Raises:
        ConfigError: there are no images, or an output is NaN or infinite (names the file and the image).
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


def predictor(model: nn.Module | Predictor) -> Predictor:
    """A module as a function of arrays, in eval mode, on its own device; another function stays as it is.

    Of several outputs it gives the first.
    """
    torch = sys.modules.get("torch")  # where there is a module, torch has been imported
    if torch is not None and isinstance(model, torch.nn.Module):
        return lambda images: np.asarray(module_outputs(model, images)[0], np.float32)
    return model


def all_outputs(model: nn.Module | Predictor) -> Callable[[Any], Sequence[Array]]:
    """As `predictor`, with every output: of a module, of what has a method `outputs`; else the logits alone."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return lambda batch: module_outputs(model, batch)
    every: Callable[[Any], Sequence[Array]] | None = getattr(model, "outputs", None)
    return every or (lambda batch: (model(batch),))


def _measure(predict: Predictor, batches: Batches, name: str, progress: bool) -> Accuracy:
    images = top5 = classes = 0
    of_class, right = Counter[int](), Counter[int]()
    for pixels, labels in shown(batches, f"accuracy of {name}", progress):
        logits, truth = predict(pixels), np.asarray(labels).reshape(-1, 1)
        if not np.isfinite(logits).all():
            image = images + int(np.nonzero(~np.isfinite(logits).all(axis=1))[0][0])
            raise ConfigError("onnx file", name, f"its output for image {image} is NaN or infinite")
        best = np.argsort(-logits, axis=1, kind="stable")[:, :5]
        of_class.update(truth[:, 0].tolist())
        right.update(truth[best[:, :1] == truth].tolist())
        top5 += int((best == truth).sum())
        images, classes = images + len(truth), logits.shape[1]
    if not images:
        raise ConfigError("data.test_images", 0, "at least one labelled image is needed to measure accuracy")
    return Accuracy(
        100 * right.total() / images,
        100 * top5 / images if classes > 5 else None,
        images,
        *(tuple(counts[label] for label in range(classes)) for counts in (of_class, right)),
    )
