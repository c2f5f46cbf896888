"""What a run tried before it chose: calibration methods, algorithms, epochs; plain dataclasses, as `Results` is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One way to choose all ranges, as a whole model on the images that chose between them.

    `score`, the task's main metric (None without labels), and the mean squared difference of the outputs from the float
    model's, relative to their size, are of the file in ONNX Runtime; None for a method that was left out for its
    `output_error`, the mean over all tensors of the relative squared error of what the operators behind one compute.
    """

    method: str
    output_error: float
    score: float | None
    logit_error: float | None
    chosen: bool
    images: int


@dataclass(frozen=True)
class Tried:
    """What was kept before with one more algorithm, as a file on images that none of them has seen.

    `agreement` is the share of images that are decided as by float, `sqnr_db` of the outputs against float's,
    `seconds` what it took with its judgement. All None for one that was not tried; `why` says so.
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
    """What was found of the weights after so many epochs, at one optimizer step; `seconds` is what that took."""

    epoch: float
    step: int
    score: float  # the task's main metric
    seconds: float | None = None
    kept: bool = False


@dataclass(frozen=True)
class Curve:
    """The epochs of one stage that trained. `chosen`: they were judged on `images` training images held out, by the
    file in ONNX Runtime (of a float control in PyTorch), and one of them is kept; else what trains, and the
    last is kept. `held_out`: whether the images are held out of training, or the test images, which choose nothing.
    """

    stage: str
    chosen: bool
    images: int
    epochs: Sequence[Epoch]
    held_out: bool = False
