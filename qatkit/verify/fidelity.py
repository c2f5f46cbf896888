"""Measures how close one file's outputs are to another's, image by image, without labels.

    agreement    share of outputs with the same decision (`Task.agreement`)
    divergence   mean of `Task.divergence` over the outputs, in nats; not every task defines it
    SQNR         10 log10( sum exact^2 / sum (exact - found)^2 ), in dB, over all values

An output with further axes ([N, classes, H, W]) counts once per position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit.progress import Batches, shown
from qatkit.records.results import Fidelity
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.verify.accuracy import Predictor
from qatkit_verify.errors import ConfigError

_Array = NDArray[np.float64]


_CHANNELS = 1024  # maximum size of a last axis of channels; a larger axis consists of positions or samples
_SCALES = 100.0  # ratio of channel powers above which each channel counts separately


class OutputDistance:
    """The distance of an output from the float file's, over all values and per channel of the last axis."""

    def __init__(self) -> None:
        self._signal: _Array | None = None
        self._noise: _Array | None = None

    def add(self, exact: NDArray[Any], found: NDArray[Any]) -> None:
        """Adds one batch of the output of both files, if it is floating-point and of one shape."""
        if exact.shape != found.shape or exact.dtype.kind != "f":
            return
        wide = exact.ndim > 1 and 1 < exact.shape[-1] <= _CHANNELS
        rows = exact.astype(np.float64).reshape(-1, exact.shape[-1] if wide else 1)
        signal = np.square(rows).sum(0)
        noise = np.square(rows - found.reshape(rows.shape)).sum(0)
        if self._signal is None or self._noise is None or len(self._signal) != len(signal):
            self._signal, self._noise = np.zeros_like(signal), np.zeros_like(noise)
        self._signal, self._noise = self._signal + signal, self._noise + noise

    def figures(self, name: str) -> dict[str, Any]:
        """Returns the SQNR in dB, and the worst channel if channels differ in scale.

        The SQNR is None if the outputs are equal or were not compared.
        """
        found: dict[str, Any] = {"name": name, "sqnr_db": None}
        if self._signal is None or self._noise is None:
            return found
        found["sqnr_db"] = _decibel(self._signal.sum(), self._noise.sum())
        told = self._signal > 0
        if told.sum() > 1 and self._signal[told].max() > _SCALES * self._signal[told].min():
            each = np.where(told & (self._noise > 0), self._signal / np.maximum(self._noise, 1e-300), np.inf)
            worst = int(each.argmin())
            worst_db = _decibel(self._signal[worst], self._noise[worst])
            found |= {"channels": len(each), "worst_channel": worst, "worst_channel_db": worst_db}
        return found


class SampleDistance:
    """The cosine similarities and L2 distances between one output of two files, sample by sample."""

    def __init__(self) -> None:
        self._cosines: list[float] = []
        self._lengths: list[float] = []

    def add(self, exact: NDArray[Any], found: NDArray[Any], samples: int) -> None:
        """Adds one batch of both files; an output whose first axis is not `samples` counts as one sample."""
        if exact.shape != found.shape or exact.dtype.kind != "f":
            return
        count = samples if exact.ndim and len(exact) == samples else 1
        a, b = (values.astype(np.float64).reshape(count, -1) for values in (exact, found))
        sizes = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines = np.clip((a * b).sum(1) / np.where(sizes, sizes, 1.0), -1.0, 1.0)
        self._cosines += np.where((a == b).all(axis=1), 1.0, cosines).tolist()
        self._lengths += np.linalg.norm(a - b, axis=1).tolist()

    def figures(self) -> dict[str, Any]:
        """Returns cosine similarities and L2 distances of the outputs, as means and worst samples.

        The result is empty for integer outputs and for outputs whose shapes differ.
        """
        if not self._cosines:
            return {}
        return {
            "samples": len(self._cosines),
            "cosine": float(np.mean(self._cosines)),
            "least_cosine": min(self._cosines),
            "l2": float(np.mean(self._lengths)),
            "largest_l2": max(self._lengths),
        }


def _decibel(signal: float, noise: float) -> float | None:
    return 10 * math.log10(max(signal / noise, np.finfo(float).tiny)) if noise else None


class Distance:
    """The running sums of the fidelity measures, updated batch by batch."""

    def __init__(self, task: Task) -> None:
        self.task, self.agreement = task, task.agreement()
        self.images = self.outputs = 0
        self.signal = self.noise = 0.0
        self.divergence: float | None = 0.0

    def add(self, exact: _Array, found: _Array) -> None:
        """Adds outputs [N, classes, ...] of both files for the same images."""
        self.images += len(exact)
        (found,) = self.task.aligned([exact], [found])
        rows, others = _rows(exact), _rows(found)
        self.outputs += len(rows)
        self.agreement.add(exact, found)
        divergence = self.task.divergence(rows, others)
        if divergence is not None and self.divergence is not None:
            self.divergence += divergence
        else:
            self.divergence = None
        self.signal += float(np.square(rows).sum())
        self.noise += float(np.square(rows - others).sum())

    def result(self) -> Fidelity:
        decibel = _decibel(self.signal, self.noise)
        divergence = None if self.divergence is None else max(0.0, self.divergence / self.outputs)
        same = self.agreement
        return Fidelity(same.share, divergence, decibel, self.images, same.remark, same.doubt)


def _rows(outputs: _Array) -> _Array:
    """Reshapes to [outputs, classes]: the class axis last, the other axes merged."""
    return np.moveaxis(outputs, 1, -1).reshape(-1, outputs.shape[1]) if outputs.ndim > 1 else outputs[:, None]


def fidelity(
    exact: Predictor,
    others: Mapping[str, Predictor],
    batches: Batches,
    progress: bool = False,
    *,
    task: Task = CLASSIFICATION,
) -> dict[str, Fidelity]:
    """Compares each of `others` with `exact` over the images of `batches`; labels are not used.

    Raises:
        ConfigError: there are no images, or an output is NaN or infinite; the message names the predictor and
            the image.
    """
    distances = {name: Distance(task) for name in others}
    seen, sample = 0, task.names.sample
    for images, _ in shown(batches, "agreement with float", progress):
        wanted = finite("float", exact(images), seen, sample)
        for name, predict in others.items():
            distances[name].add(wanted, finite(name, predict(images), seen, sample))
        seen += len(wanted)
    if not seen:
        raise ConfigError("data.test_images", 0, "at least one sample to compare outputs")
    return {name: distance.result() for name, distance in distances.items()}


def finite(name: str, outputs: Any, seen: int, unit: str = "sample") -> _Array:
    """Returns outputs as float64.

    Raises:
        ConfigError: an output is NaN or infinite; the message names the predictor and the sample or other
            `unit`, whose number is counted from `seen`.
    """
    values = np.asarray(outputs, np.float64)
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if bad.any():
        image = seen + int(np.nonzero(bad)[0][0])
        raise ConfigError("file or module", name, reason=f"its output for {unit} {image} is NaN or infinite")
    return values


def unlabelled(batches: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    """Turns batches of images without labels into `Batches`, with a None label per image."""
    return ((images, [None] * len(images)) for images in batches)
