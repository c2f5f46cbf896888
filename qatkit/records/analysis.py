"""The findings of an analysis as plain dataclasses, for reports and for choices based on them. Nothing here
needs torch.

Shares are 0..1, accuracies and losses of accuracy in percent and points, divergences in nats, SQNR in dB
(None: no difference at all).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WEIGHT, ACTIVATION = "weight", "activation"
ONLY, ALL_BUT = "only", "all but"
# The endings of the advice of an isolation.
BY_WEIGHTS = "most of the outputs' error comes from the weights"
BY_ACTIVATIONS = "most of the outputs' error comes from the activations"
BY_BOTH = "weights and activations contribute about equally to the outputs' error"


@dataclass(frozen=True)
class Outcome:
    """The outputs of one way to compute, over all images, compared with those of the float graph.

    Attributes:
        images: the number of images.
        score: the percentage of right decisions; None without labels, or if labels are not classes.
        agreement: share of the outputs with the same decision as float.
        loss: divergence of float's softmax to this one's, mean over the outputs.
        cross_entropy: mean, nats; None without labels.
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
    """A weight or activation that is the only one quantized (direction "only") or the only one in float ("all but").

    Attributes:
        site: the operator, or the tensor's producer, as reports and overrides name it.
        kind: "weight" or "activation".
        direction: "only" or "all but".
        score, agreement, loss, cross_entropy, sqnr: see `Outcome`; an estimate has only the loss.
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
    """A class with its percentages of right decisions in float and quantized, on the same images."""

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
    """The losses by weights and by activations, which show what causes the error.

    Attributes:
        outcomes: by "float", "weights", "activations", "both", and "int8" for ONNX Runtime if there is a
            file. Float is the same module with nothing quantized; after fine-tuning, it has the fine-tuned
            weights.
        classes: the classes with the largest loss first; empty without labels.
        advice: one line.
    """

    outcomes: Mapping[str, Outcome]
    classes: Sequence[ClassRow]
    advice: str


@dataclass(frozen=True)
class Difference:
    """The difference between a tensor and the same tensor computed in another way.

    Attributes:
        mse: mean squared difference.
        sqnr: 10 log10(sum of exact^2 / sum of differences^2).
        cosine: cosine of the angle between the two.
        largest: largest absolute difference.
        shift: mean of the found values minus mean of the exact ones.
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
        step: the distance between two values of the type; the largest one if there are several scales.
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
        own: the error of only its own quantization, on the float values.
        simulated: float against the simulation, with everything before it quantized; None for a weight.
        runtime: float against ONNX Runtime's integers, dequantized; None if the file has no such tensor.
        clipped: share of the float values beyond the range.
        grid: share of the type's integers that occur.
        avoidable: its own error over that of the range from the smallest to the largest value, in dB: near 0
            or below is fine.
        histogram: the histogram, for the tensors that pictures show.
        picture: the file with its histogram, relative to the run's folder; "" if there is none.
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
    """Every quantized tensor in graph order, and where errors begin.

    Attributes:
        suspect: the tensor whose scale costs the most that another scale would not; None if there is none.
        first: the first tensor of the file that ONNX Runtime computes differently from the simulation, with
            its operator, in words; None if there is none or no file.
    """

    images: int
    rows: Sequence[TensorRow]
    suspect: str | None = None
    first: str | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Analysis:
    """All results of an analysis."""

    labelled: bool = True
    isolation: Isolation | None = None
    sensitivity: Sequence[SensitivityRow] = ()
    estimate: Sequence[SensitivityRow] = ()
    comparison: Comparison | None = None
    pictures: Sequence[str] = ()  # files, relative to the run's folder
    notes: Sequence[str] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)  # by the part of the analysis
