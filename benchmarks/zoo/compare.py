"""Comparisons of the outputs of models, captured graphs and files, without qatkit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
# Relative to the largest value of an output, rounding causes no larger differences than this.
TOLERANCE = 1e-3


def leaves(value: Any) -> list[Tensor]:
    """Returns the tensors of nested outputs or inputs, in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    return []


def arrays(value: Any) -> list[Array]:
    """Returns `leaves` as NumPy arrays, bfloat16 as float32."""
    found = (leaf.detach() for leaf in leaves(value))
    return [(leaf.float() if leaf.dtype is torch.bfloat16 else leaf).numpy() for leaf in found]


def difference(expected: Sequence[Array], found: Sequence[Array], tolerance: float = TOLERANCE) -> str:
    """Describes the first output that differs by more than `tolerance`, in one line; "" if none does."""
    if len(expected) != len(found):
        return f"{len(found)} outputs instead of {len(expected)}"
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.shape != other.shape:
            return f"output {index}: shape {list(other.shape)} instead of {list(one.shape)}"
        if one.dtype.kind != "f":
            if unequal := float((one != other).mean()):
                return f"output {index}: {100 * unequal:.1f} % of its values"
        elif (size := relative(one, other)) > tolerance:
            return f"output {index}: {size:.1e} of its largest value"
    return ""


def relative(expected: Array, found: Array) -> float:
    """Returns the largest difference divided by the largest absolute value of the finite expected ones.

    It is infinite if a value is finite in only one of the arrays.
    """
    if not np.array_equal(np.isfinite(expected), np.isfinite(found)):
        return math.inf
    finite = np.isfinite(expected)
    largest = np.abs(expected[finite].astype(np.float64)).max(initial=1e-12)
    gap = np.abs(expected[finite].astype(np.float64) - found[finite])
    return float(gap.max(initial=0.0) / largest)


def snr(expected: Sequence[Array], found: Sequence[Array]) -> float | None:
    """Returns the signal-to-noise ratio of the worst float output, in dB.

    It is None if no output is float or the number of outputs differs, and 200 if all float values are equal.
    Values that are not finite are ignored. The mean over the samples (a bias) does not count as signal, unless all
    samples have the same output.
    """
    worst: float | None = None
    if len(expected) != len(found):
        return None  # `difference` reports it
    for one, other in zip(expected, found, strict=True):
        if one.dtype.kind != "f":
            continue
        usable = np.isfinite(one) & np.isfinite(other)
        exact, given = (np.where(usable, values, 0).astype(np.float64) for values in (one, other))
        noise = float(((exact - given) ** 2).mean())
        signal = 0.0 if (exact == exact[:1]).all() else float(((exact - exact.mean(0)) ** 2).mean())
        signal = signal or float((exact**2).mean())  # the output is the same for all samples
        value = 200.0 if noise == 0 else 10 * math.log10(max(signal, 1e-30) / noise)
        worst = value if worst is None else min(worst, value)
    return worst


def same_choice(expected: Sequence[Array], found: Sequence[Array]) -> float:
    """Returns the lowest share, over the outputs, of equal integers or, for a float output, of equal argmax.

    The argmax is over the last axis; float outputs without several classes there are ignored. The share is 0
    if the number of outputs differs, and 1 if nothing can be compared.
    """
    shares = []
    if len(expected) != len(found):
        return 0.0
    for one, other in zip(expected, found, strict=True):
        if one.dtype.kind == "f" and one.ndim > 1 and one.shape[-1] > 1:
            one, other = one.argmax(-1), other.argmax(-1)  # noqa: PLW2901
        if one.dtype.kind != "f":
            shares.append(float((one == other).mean()))
    return min(shares, default=1.0)


class File:
    """An ONNX file, run on one thread and called with the inputs of its model."""

    def __init__(self, path: Path, *, optimize: bool) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        if not optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])

    def __call__(self, batch: Any) -> list[Array]:
        return list(self.session.run(None, self.feed(batch)))

    def feed(self, batch: Any) -> dict[str, Array]:
        """Returns the arrays of a batch by the names of the file's inputs."""
        names = [one.name for one in self.session.get_inputs()]
        given = [leaf.numpy() for leaf in leaves(batch)]
        if isinstance(batch, Mapping) and set(names) <= batch.keys():
            given = [batch[name].numpy() for name in names]
        return dict(zip(names, given, strict=True))
