"""The results of an analysis as plain dataclasses, for reports and for choices. This module does not need torch.

Shares are in 0..1, accuracies in percent, losses of accuracy in points, divergences in nats, and SQNR in dB,
where None means no difference at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WEIGHT, ACTIVATION = "weight", "activation"
ONLY, ALL_BUT = "only", "all but"
# The last words of the advice of an isolation.
BY_WEIGHTS = "most of the outputs' error comes from the weights"
BY_ACTIVATIONS = "most of the outputs' error comes from the activations"
BY_BOTH = "weights and activations contribute about equally to the outputs' error"


@dataclass(frozen=True)
class Outcome:
    """The outputs of one variant of the graph over all images, compared with those of the float graph.

    Attributes:
        images: the number of images.
        score: the percentage of correct decisions; None without labels, or if labels are not classes.
        agreement: the share of outputs with the same decision as float.
        loss: the KL divergence from float's softmax to that of the variant, averaged over the outputs.
        cross_entropy: the mean cross entropy in nats; None without labels.
        sqnr: the SQNR of the outputs; the lowest of several outputs.
    """

    images: int
    score: float | None
    agreement: float
    loss: float
    cross_entropy: float | None
    sqnr: float | None


@dataclass(frozen=True)
class SensitivityRow:
    """The effect of one weight or activation: only it is quantized ("only"), or only it is float ("all but").

    Attributes:
        site: the operator, or the tensor's producer, by its name in reports and overrides.
        kind: "weight" or "activation".
        direction: "only" or "all but".
        score, agreement, loss, cross_entropy, sqnr: see `Outcome`; an estimate has only the loss.
        exact: whether the row was measured and not estimated.
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
    """A class with its percentages of correct decisions in float and quantized, on the same images."""

    name: str
    images: int
    float_score: float
    score: float

    @property
    def lost(self) -> float:
        """The loss of accuracy in points."""
        return self.float_score - self.score


@dataclass(frozen=True)
class Isolation:
    """The losses due to weights and due to activations, which show what causes the error.

    Attributes:
        outcomes: the outcomes by "float", "weights", "activations", "both", and "int8" (ONNX Runtime, if
            there is a file). Float is the same module without quantization; after fine-tuning it has the
            fine-tuned weights.
        classes: the classes, the largest loss first; empty without labels.
        advice: one line of advice.
    """

    outcomes: Mapping[str, Outcome]
    classes: Sequence[ClassRow]
    advice: str


@dataclass(frozen=True)
class Difference:
    """The difference between the exact values of a tensor and those found when it is computed in another way.

    Attributes:
        mse: the mean squared difference.
        sqnr: 10 log10(sum of exact^2 / sum of differences^2).
        cosine: the cosine of the angle between both tensors.
        largest: the largest absolute difference.
        shift: the mean of the found values minus the mean of the exact ones.
    """

    mse: float
    sqnr: float | None
    cosine: float
    largest: float
    shift: float


@dataclass(frozen=True)
class Histogram:
    """The number of a tensor's values in each bin, in float and quantized, and the range of its quantization.

    Attributes:
        low, high: the ends of the bins.
        exact, found: the counts in float and quantized, per bin.
        range_low, range_high: the smallest and the largest value that the quantized tensor can have.
        step: the distance between neighbouring values of the quantized tensor, its scale; with several scales, the
            largest one.
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
    """The errors of one quantized tensor.

    Attributes:
        site, kind: see `SensitivityRow`.
        own: the error due to only the tensor's own quantization, on the float values.
        simulated: the error of the simulation, with everything before the tensor quantized; None for a
            weight.
        runtime: the error of ONNX Runtime's dequantized integers; None without a file that has the tensor.
        clipped: the share of float values outside the range.
        grid: the share of the type's integers that occur.
        avoidable: the ratio of `own` to the error with the range from the smallest to the largest value, in
            dB. Values near or below 0 are fine.
        histogram: the histogram, for the tensors that pictures show.
        picture: the file with the histogram, relative to the run's folder; "" if there is none.
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
    """All quantized tensors in graph order, and where errors begin.

    Attributes:
        images: the number of images.
        rows: the tensors.
        suspect: the tensor whose scale causes the largest avoidable error; None if there is none.
        first: a description of the first tensor (with its operator) that ONNX Runtime computes differently
            from the simulation; None if there is no such tensor, or no file.
        notes: notes for the report.
    """

    images: int
    rows: Sequence[TensorRow]
    suspect: str | None = None
    first: str | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Analysis:
    """All results of an analysis; parts that were not requested are None or empty."""

    labelled: bool = True
    isolation: Isolation | None = None
    sensitivity: Sequence[SensitivityRow] = ()
    estimate: Sequence[SensitivityRow] = ()
    comparison: Comparison | None = None
    pictures: Sequence[str] = ()  # file names, relative to the run's folder
    notes: Sequence[str] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)  # seconds by part of the analysis
