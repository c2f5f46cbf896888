"""Records of everything that is measured on a file, as plain dataclasses.

Units are in the names; agreement is a share 0..1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A figure that measures how well a task is done.

    Attributes:
        name: the name in reports: "MAE".
        value: the value in `unit`; None if it was not measured.
        unit: the unit: "%", "degrees"; "" for a plain number.
        higher_is_better: whether larger values are better.
    """

    name: str
    value: float | None = None
    unit: str = "%"
    higher_is_better: bool = True

    @property
    def key(self) -> str:
        """The name in JSON: "mae"."""
        return self.name.lower().replace("-", "").replace(" ", "_")

    @property
    def title(self) -> str:
        """The heading of a column: "MAE degrees"."""
        return f"{self.name} {self.unit}".rstrip()

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return "points" if self.unit == "%" else self.unit

    @property
    def below(self) -> str:
        """The side on which a worse value lies: "below" or "above"."""
        return "below" if self.higher_is_better else "above"

    @property
    def text(self) -> str:
        """The value with its unit: "97.50 %"; "-" if it was not measured."""
        return "-" if self.value is None else f"{self.value:.2f} {self.unit}".rstrip()

    def of(self, value: float | None) -> Metric:
        """Returns the same metric with a value."""
        return dataclasses.replace(self, value=value)

    def lost(self, before: float, now: float) -> float:
        """Returns by how much `now` is worse than `before`; negative if it is better."""
        return before - now if self.higher_is_better else now - before

    def change(self, lost: float) -> float:
        """Returns the change of the value for a loss: `-lost` if higher values are better, else `lost`."""
        return -lost if self.higher_is_better else lost

    def best(self, values: Iterable[float]) -> float:
        """Returns the best of some values."""
        return max(values) if self.higher_is_better else min(values)


@dataclass(frozen=True)
class TaskNames:
    """The names of a task in reports, as plain data that report.json keeps.

    Attributes:
        name: the short name: "classification".
        description: a description for model cards: "image classification".
        metrics: the metrics without values, in the order of the report's table; the first is the main metric.
        decision: the name of what is equal if two models agree, after "same": "top-1 class".
        outputs: the name of a model's outputs.
        compared: the name of what is equal if two computations of an output agree; "" if it is the decision.
        samples: the name of a model's inputs, in the plural.
    """

    name: str
    description: str
    metrics: tuple[Metric, ...]
    decision: str = "answer"
    outputs: str = "outputs"
    compared: str = ""
    samples: str = "images"

    @property
    def alike(self) -> str:
        """The name of what is equal if two computations of an output agree."""
        return self.compared or self.decision

    @property
    def sample(self) -> str:
        """The name of one input of the model: "image"."""
        return self.samples.removesuffix("s")

    @property
    def same(self) -> str:
        """The heading of the share of decisions that equal float's: "same top-1 class as float, %"."""
        return f"same {self.decision} as float, %"

    @property
    def main(self) -> Metric:
        """The main metric, by which models are compared."""
        return self.metrics[0]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain containers, without the measured `value` of each metric."""
        record = dataclasses.asdict(self)
        for metric in record["metrics"]:
            del metric["value"]
        # Older readers do not know these keys.
        if not self.compared:
            del record["compared"]
        if self.samples == "images":
            del record["samples"]
        return record

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> TaskNames:
        """Reads names from the output of `as_dict`.

        Raises:
            KeyError, TypeError: the record is not such an output.
        """
        metrics = tuple(Metric(**metric) for metric in stored["metrics"])
        return cls(**{**stored, "metrics": metrics})


@dataclass(frozen=True)
class Scores:
    """The scores of a file by the metrics of a task.

    Attributes:
        metrics: the metrics in the order of `TaskNames.metrics`.
        images: the number of images on which they were measured.
        class_images, class_right: the number of images of each class, in the order of the outputs, and how
            many of them were classified correctly. For segmentation they count the pixels of union and of
            intersection. For detection they are the number of labelled boxes, and that number times the
            average precision. Both are empty for tasks without classes.
    """

    metrics: tuple[Metric, ...]
    images: int
    class_images: tuple[int, ...] = ()
    class_right: tuple[float, ...] = ()

    @property
    def main(self) -> Metric:
        """The main metric, by which models are compared."""
        return self.metrics[0]

    @property
    def score(self) -> float:
        """The value of the main metric."""
        assert self.main.value is not None
        return self.main.value

    def as_dict(self) -> dict[str, Any]:
        """Returns plain containers: the value of each metric by its key, then the counts."""
        counts = {"images": self.images, "class_images": self.class_images, "class_right": self.class_right}
        return {metric.key: metric.value for metric in self.metrics} | counts


@dataclass(frozen=True)
class Latency:
    """The time of a file per run, compared with the first file of the same measurement.

    `ratio` is the median over rounds of (first file's time / this file's time): above 1 is faster.
    """

    median_ms: float
    p10_ms: float
    p90_ms: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    batch: int
    threads: int
    runs: int

    @property
    def noise(self) -> str:
        """The remark on an uncertain ratio (`noise`)."""
        return noise(self.ratio_p10, self.ratio_p90)

    @property
    def speed(self) -> str:
        """The ratio as text: "1.40x", or "1.40x, noisy: 0.80 to 2.10"."""
        return ", ".join(filter(None, [f"{self.ratio:.2f}x", self.noise]))


def noise(low: float | None, high: float | None) -> str:
    """Returns the remark on an uncertain ratio of times, "noisy: 0.80 to 2.10"; "" for a clear or unknown one.

    A ratio is uncertain if the range from its p10 `low` to its p90 `high` includes 1, or if `high` is at least
    twice `low`.
    """
    if low is None or high is None:
        return ""
    return f"noisy: {low:.2f} to {high:.2f}" if low < 1 < high or high >= 2 * low else ""


@dataclass(frozen=True)
class Comparison:
    """A comparison of two computations of an output over the same images (see `qatkit_verify.compare`)."""

    agreement: float  # share of equal decisions, 0..1
    max_abs: float
    mean_abs: float
    max_steps: float  # max_abs in steps of the output
    mean_steps: float
    ties: float = 0.0  # share of decisions that differ by a tie

    @property
    def held(self) -> float:
        """The share of equal decisions, where ties count as equal."""
        return self.agreement + self.ties


@dataclass(frozen=True)
class Hardware:
    """The machine on which something was measured."""

    cpu: str
    cores: int
    isa: tuple[str, ...]  # the instruction sets that decide int8 speed
    threads: int
    system: str
