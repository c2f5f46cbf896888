"""A front of mixed precisions as plain dataclasses, for the report and for later runs. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qatkit.records.scores import with_score
from qatkit_verify.classification import TOP1
from qatkit_verify.placement.sites import FloatSites, read_float_sites
from qatkit_verify.records import Metric


@dataclass(frozen=True)
class PrecisionPoint:
    """A file on the front.

    Attributes:
        number: the number with which a later run selects it (`precision.point`), 0 for the fastest.
        floats: sites of the float operators, in graph order; None for the float model itself.
        operators: how many of the operators that can be int8 are float.
        predicted_ms, ms: time per run, before and after the measurement; predicted from the files that were
        timed before.
        ratio: float's time over this one's.
        score: the task's main metric; None without labels.
        agreement: share of the images with the same decision as float.
        sqnr_db: SQNR of the outputs against float's; None: equal.
        chosen: whether the run continued with it.
    """

    number: int
    floats: FloatSites | None
    operators: int
    predicted_ms: float
    ms: float
    ratio: float
    score: float | None
    agreement: float
    sqnr_db: float | None
    chosen: bool = False

    @property
    def name(self) -> str:
        """The name of the point, as reports show it."""
        if self.floats is None:
            return "float"
        return f"{self.operators} float" if self.floats else "int8"


@dataclass(frozen=True)
class Precision:
    """A front, the fastest point first, and how it was found.

    Attributes:
        points: none is beaten by another in both time and error, except int8 and float, which are always
            included.
        operators: number of the model's operators that can be int8.
        measured: number of files that were made and run, including those that were beaten.
        images: number of images that judged them, held out of calibration.
        note: why this point was chosen.
        steps: for a model with states, the calibration steps over which each file kept its own states, for
            agreement and SQNR; 0 for other models.
    """

    points: Sequence[PrecisionPoint]
    operators: int
    measured: int
    images: int
    note: str
    steps: int = 0

    @property
    def chosen(self) -> PrecisionPoint:
        """The point that the run continued with."""
        return next(point for point in self.points if point.chosen)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain containers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], metric: Metric = TOP1) -> Precision:
        """Returns the inverse of `as_dict`, also after a round trip through JSON or a report of a task with
        this metric.
        """
        points = []
        for row in (with_score(row, metric) for row in stored["points"]):
            floats = row["floats"]
            points.append(
                PrecisionPoint(**{**row, "floats": None if floats is None else read_float_sites(floats)})
            )
        return cls(**{**stored, "points": tuple(points)})
