"""Measures the cost of saturation: for each operator on exact inputs, and for the whole file on real images.

exact     each operator that can saturate computes both outputs, and the exact one is passed on
emulated  the emulated output is passed on, which gives the outputs of a processor without VNNI
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from qatkit.progress import Batches, shown
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.verify.emulation import Emulation
from qatkit.verify.int8_kernels import Int8Kernel
from qatkit_verify.compare import Output, deciding
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array


@dataclass
class Layer:
    """The effect of saturation on one operator that can saturate, over all images, with exact inputs.

    Attributes:
        outputs, clipped: the number of output values, and of those whose sums change.
        total, largest: the sum and the maximum of the absolute errors of the output, in integers or as floats.
        noise, signal: the sums of the squares of errors and of exact outputs.
        low, high: the range of a float output.
        whole: whether the output consists of integers, whose step is 1.
    """

    outputs: int = 0
    clipped: int = 0
    total: float = 0.0
    largest: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    low: float = np.inf
    high: float = -np.inf
    whole: bool = True

    def add(self, kernel: Int8Kernel, x: Array) -> None:
        """Adds the exact and the emulated outputs of the operator for one batch of its inputs."""
        zero = kernel.settled.output_zero
        self.whole = zero is not None
        for clipped, exact, emulated in kernel.both(x):
            self._add(0.0 if zero is None else float(zero), clipped, exact, emulated)

    def _add(self, zero: float, clipped: Array, exact: Array, emulated: Array) -> None:
        where = np.nonzero(clipped)  # only a few places; everything else is equal
        error = np.abs(emulated[where].astype(np.float64) - exact[where])
        right = (exact.astype(np.float32) - zero).ravel()
        self.outputs += clipped.size
        self.clipped += error.size
        self.total += float(error.sum())
        self.largest = max(self.largest, float(error.max(initial=0)))
        self.noise += float((error**2).sum())
        self.signal += float(right @ right)
        self.low, self.high = min(self.low, float(exact.min())), max(self.high, float(exact.max()))

    @property
    def step(self) -> float:
        """The step of the output's quantization; for a float output 1/255 of its range."""
        return 1.0 if self.whole else (self.high - self.low) / 255 or 1.0

    @property
    def relative(self) -> float:
        """The power of the errors divided by that of the output."""
        return self.noise / self.signal if self.signal else 0.0


@dataclass(frozen=True)
class Answers:
    """Figures of the file's outputs while certain operators saturate.

    Attributes:
        agreement: the share of images (or positions) with the same decision as without saturation
            (`qatkit_verify.compare`).
        score: the value of the task's main metric; None without labels.
        sqnr_db: the SQNR of the first output against that without saturation; None if they are equal.
    """

    agreement: float
    score: float | None
    sqnr_db: float | None = None


@dataclass
class Saturation:
    """All measured figures about saturation.

    Attributes:
        layers: the operators that can saturate, by name, in graph order.
        images: the number of images on which they were measured; 0 if nothing can saturate.
        exact, emulated: the figures of the file's outputs with VNNI and without; None if nothing can
            saturate.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    images: int = 0
    exact: Answers | None = None
    emulated: Answers | None = None


def measure_saturation(
    emulation: Emulation,
    batches: Batches,
    *,
    labelled: bool = True,
    progress: bool = False,
    task: Task = CLASSIFICATION,
) -> Saturation:
    """Runs real images through a file, exact and emulated, and returns the figures.

    Args:
        emulation: the file.
        batches: the batches, (images, labels), which can be iterated repeatedly.
        labelled: whether the labels are meaningful.
        progress: whether to show progress bars.
        task: the task whose metric is measured.

    Raises:
        ConfigError: something can saturate, but there are no images, or an output has another shape without VNNI.
    """
    found = Saturation({kernel.name: Layer() for kernel in emulation.kernels if kernel.can_saturate})
    if not found.layers:
        return found
    walks = _Walks(emulation, batches, labelled, progress, task)
    found.images = walks.exact(found.layers)
    if not found.images:
        raise ConfigError("verify.saturation_images", 0, "at least one sample to measure saturation")
    found.exact = walks.answers((), "with VNNI")
    found.emulated = walks.answers(found.layers, "without")
    return found


class _Walks:
    """Repeated runs of a file on the same images, each with different operators that saturate."""

    def __init__(
        self, emulation: Emulation, batches: Batches, labelled: bool, progress: bool, task: Task
    ) -> None:
        self._task = task
        self._emulation, self._batches, self._labelled = emulation, batches, labelled
        self._progress = progress
        self._exact: list[tuple[Array, ...]] = []
        self._images = 0

    def exact(self, layers: dict[str, Layer]) -> int:
        """Runs the file without saturation, as the reference for other runs.

        Fills in `layers`, and returns the number of images.
        """
        for batch, labels in shown(self._batches, "saturation: exact", self._progress):
            self._exact.append(self._emulation.outputs(batch, observe=lambda k, x: layers[k.name].add(k, x)))
            self._images += len(labels)
        return self._images

    def answers(self, saturate: Collection[str], title: str) -> Answers:
        """Returns the figures while operators in `saturate` saturate; if it is empty, those of the exact outputs."""
        outputs = [Output(1, None if place else self._task.rule) for place in range(len(self._exact[0]))]
        meter = self._task.meter()
        noise = signal = 0.0
        batches = shown(self._batches, f"saturation: {title}", self._progress and bool(saturate))
        for (batch, labels), exact in zip(batches, self._exact, strict=True):
            found = self._emulation.outputs(batch, saturate) if saturate else exact
            for place, (output, reference, other) in enumerate(zip(outputs, exact, found, strict=True)):
                _check_shapes(place, reference, other)
                output.add(reference, [other])
            wanted = exact[0].astype(np.float64)
            noise += float(np.square(found[0] - wanted).sum())
            signal += float(np.square(wanted).sum())
            if self._labelled:
                meter.add(found[0], labels)
        score = meter.result().score if self._labelled else None
        decibel = 10 * math.log10(signal / noise) if noise and signal else None
        return Answers(_agreement(outputs), score, decibel)


def _check_shapes(place: int, exact: Array, emulated: Array) -> None:
    if exact.shape != emulated.shape:
        reason = f"output {place} is {list(exact.shape)} with VNNI and {list(emulated.shape)} without"
        raise ConfigError("verify.target_isa", "avx2", reason=reason)


def _agreement(outputs: list[Output]) -> float:
    """Returns the lowest agreement among the outputs that decide something.

    The step of a float output without classes is 1/255 of its range.
    """
    return min(outputs[i].comparisons(outputs[i].span / 255 or 1.0)[0].agreement for i in deciding(outputs))
