"""The candidates of a run's choices as plain dataclasses: calibration methods, algorithms and epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """The result of a calibration method, for the whole model on held-out images.

    `score` is the task's main metric (None without labels). `logit_error` is the mean squared difference
    between the outputs and the float model's, relative to the mean square of the float model's. Both are
    measured on the file in ONNX Runtime. They are None for a method that was excluded by its `output_error`:
    the relative squared error at the outputs of the operators that read a tensor, averaged over all tensors.
    """

    method: str
    output_error: float
    score: float | None
    logit_error: float | None
    chosen: bool
    images: int


@dataclass(frozen=True)
class Tried:
    """The result of an algorithm that was tried in addition to those kept before.

    The file is judged on images that no algorithm has seen.
    `agreement` is the share of images with the same decision as float, `sqnr_db` is the SQNR between the
    outputs and float's, and `seconds` is the time including the evaluation. All are None for an algorithm
    that was not tried; `why` gives the reason.
    """

    name: str
    score: float | None = None
    agreement: float | None = None
    sqnr_db: float | None = None
    seconds: float | None = None
    images: int = 0
    kept: bool = False
    why: str = ""


@dataclass(frozen=True)
class Ran:
    """An algorithm that has run: when (`Algorithm.stage`), on how many sites it changed something, and for how long."""

    name: str
    stage: str
    changed: int
    seconds: float


@dataclass(frozen=True)
class Epoch:
    """The evaluation of the weights at one optimizer step; `seconds` is the duration of the evaluation."""

    epoch: float
    step: int
    score: float  # the task's main metric
    seconds: float | None = None
    kept: bool = False


@dataclass(frozen=True)
class Curve:
    """The epochs of one training stage.

    If `chosen` is True, the epochs were judged on `images` held-out training images by the file in ONNX
    Runtime (for a float control in PyTorch), and the best one is kept. Otherwise the training model was
    evaluated, and the last epoch is kept. `held_out` says whether the images are held out of training. If
    not, they are the test images, which do not affect any choice.
    """

    stage: str
    chosen: bool
    images: int
    epochs: Sequence[Epoch]
    held_out: bool = False
