"""What an analysis found, as plain dataclasses, for the report and for whoever decides by it. Nothing here needs torch.

Shares are 0..1, accuracies and losses of accuracy in percent and points, divergences in nats, SQNR in dB (None: no
difference at all).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WEIGHT, ACTIVATION = "weight", "activation"
ONLY, ALL_BUT = "only", "all but"
# How the advice of an isolation ends.
BY_WEIGHTS = "most of the outputs' error comes from the weights"
BY_ACTIVATIONS = "most of the outputs' error comes from the activations"
BY_BOTH = "weights and activations make about as much of the outputs' error"


@dataclass(frozen=True)
class Outcome:
    """The outputs of one way to compute, over all images, against the float graph's.

    Attributes:
        images: how many.
        score: percent that is right; None without labels, and where labels are no classes.
        agreement: share of the outputs that are decided as by float.
        loss: divergence of float's softmax to this one's, mean over the outputs.
        cross_entropy: mean, nats; None without labels.
        sqnr: of the outputs; of several the lowest.
    """

    images: int
    score: float | None
    agreement: float
    loss: float
    cross_entropy: float | None
    sqnr: float | None


@dataclass(frozen=True)
class SensitivityRow:
    """One weight or activation, quantized alone (direction "only") or left float alone ("all but").

    Attributes:
        site: of the operator, or of the tensor's producer, as reports and overrides name it.
        kind: "weight" or "activation".
        direction: "only" or "all but".
        score, agreement, loss, cross_entropy, sqnr: as of `Outcome`; of an estimate the loss alone is known.
        exact: measured, not estimated.
    """

    site: str
    kind: str
    direction: str
    score: float | None
    loss: float
    sqnr: float | None
    agreement: float | None = None
    cross_entropy: float | None = None
    exact: bool = True


@dataclass(frozen=True)
class ClassRow:
    """One class, by the same images in float and quantized; shares that are right in percent."""

    name: str
    images: int
    float_score: float
    score: float

    @property
    def lost(self) -> float:
        """Points."""
        return self.float_score - self.score


@dataclass(frozen=True)
class Isolation:
    """Which side loses.

    Attributes:
        outcomes: by "float", "weights", "activations", "both", and "int8" for ONNX Runtime where there is a file. Float
            is the same module with nothing quantized: of one that was fine-tuned, its fine-tuned weights.
        classes: those that lose most first; empty without labels.
        advice: one line.
    """

    outcomes: Mapping[str, Outcome]
    classes: Sequence[ClassRow]
    advice: str


@dataclass(frozen=True)
class Difference:
    """One tensor against the same one computed otherwise.

    Attributes:
        mse: mean squared difference.
        sqnr: 10 log10(sum of exact^2 / sum of differences^2).
        cosine: of the angle between the two.
        largest: absolute difference.
        shift: mean of the found minus mean of the exact.
    """

    mse: float
    sqnr: float | None
    cosine: float
    largest: float
    shift: float


@dataclass(frozen=True)
class Histogram:
    """Counts of a tensor's values between two ends, bin by bin, in float and quantized, and the range of the type.

    Attributes:
        step: between two of its values; of several scales the largest.
    """

    low: float
    high: float
    exact: Sequence[int]
    found: Sequence[int]
    range_low: float
    range_high: float
    step: float = 0.0


@dataclass(frozen=True)
class TensorRow:
    """One quantized tensor.

    Attributes:
        site, kind: as in `SensitivityRow`.
        own: what its quantization alone does to it, on the float values.
        simulated: float against the simulation, with all that was quantized before it; None of a weight.
        runtime: float against ONNX Runtime's integers, dequantized; None where the file has no such tensor.
        clipped: share of the float values beyond the range.
        grid: share of the type's integers that occur.
        avoidable: its own error over that of the range from least to largest value, in dB: near 0 or below is fine.
        histogram: of the tensors that pictures show.
        picture: the file with its histogram, relative to the run's folder; "" where there is none.
    """

    site: str
    kind: str
    own: Difference
    simulated: Difference | None
    runtime: Difference | None
    clipped: float
    grid: float
    avoidable: float
    histogram: Histogram | None = None
    picture: str = ""


@dataclass(frozen=True)
class Comparison:
    """Every quantized tensor in graph order, and where things begin to go wrong.

    Attributes:
        suspect: the tensor whose scale costs the most that another one would not; None where none does.
        first: the first tensor of the file that ONNX Runtime computes otherwise than the simulation, with its
            operator, in words; None where there is none or no file.
    """

    images: int
    rows: Sequence[TensorRow]
    suspect: str | None = None
    first: str | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Analysis:
    """All that was asked for."""

    labelled: bool = True
    isolation: Isolation | None = None
    sensitivity: Sequence[SensitivityRow] = ()
    estimate: Sequence[SensitivityRow] = ()
    comparison: Comparison | None = None
    pictures: Sequence[str] = ()  # files, relative to the run's folder
    notes: Sequence[str] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)  # by what they were spent on
