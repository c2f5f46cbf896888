"""The candidates that a run tried before it chose: calibration methods, algorithms, epochs; plain dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A way to choose all ranges, evaluated as a whole model on the images that chose between them.

    `score` is the task's main metric (None without labels), and `logit_error` is the mean squared difference
    of the outputs from the float model's, relative to their size. Both are measured on the file in ONNX
    Runtime, and None for a method that was left out for its `output_error`: the mean over all tensors of the
    relative squared error of the outputs of the operators that read them.
    """

    method: str
    output_error: float
    score: float | None
    logit_error: float | None
    chosen: bool
    images: int


@dataclass(frozen=True)
class Tried:
    """An additional algorithm together with those kept before, as a file on images that none of them has seen.

    `agreement` is the share of images with the same decision as float, `sqnr_db` the SQNR of the outputs
    against float's, `seconds` the time with the evaluation. All are None for one that was not tried; `why`
    gives the reason.
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
class Epoch:
    """The evaluation of the weights after some epochs, at one optimizer step; `seconds` is what it took."""

    epoch: float
    step: int
    score: float  # the task's main metric
    seconds: float | None = None
    kept: bool = False


@dataclass(frozen=True)
class Curve:
    """The epochs of one training stage.

    `chosen`: they were judged on `images` held-out training images, by the file in ONNX Runtime (for a float
    control in PyTorch), and one of them is kept. Otherwise the training model was evaluated, and the last
    epoch is kept. `held_out`: whether the images are held out of training, or are the test images, which
    choose nothing.
    """

    stage: str
    chosen: bool
    images: int
    epochs: Sequence[Epoch]
    held_out: bool = False
