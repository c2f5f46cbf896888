"""A front of mixed precisions as plain dataclasses, for the report and for later runs. Torch is not needed."""

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
        number: the number with which a later run selects the point (`precision.point`); 0 is the fastest.
        floats: the sites of the float operators, in graph order; None for the float model itself.
        operators: the number of float operators among those that can be int8.
        predicted_ms, ms: the predicted and the measured time per run; the prediction uses the files that were
            timed before this one.
        ratio: float's time divided by that of the point.
        score: the task's main metric; None without labels.
        agreement: the share of images with the same decision as float.
        sqnr_db: the SQNR between the outputs and float's in dB; None if they are equal.
        chosen: whether the run continued with the point.
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
        """The displayed name of the point."""
        if self.floats is None:
            return "float"
        return f"{self.operators} float" if self.floats else "int8"


@dataclass(frozen=True)
class Precision:
    """A front, the fastest point first, and how it was found.

    Attributes:
        points: the points of the Pareto front over time and error, together with int8 and float.
        operators: the number of the model's operators that can be int8.
        measured: the number of files that were written and measured, including those not on the front.
        images: the number of images, held out of calibration, on which the files were judged.
        note: the reason why the point was chosen.
        steps: for a model with states, the number of calibration steps over which agreement and SQNR were measured
            while each file kept its own states; 0 for other models.
    """

    points: Sequence[PrecisionPoint]
    operators: int
    measured: int
    images: int
    note: str
    steps: int = 0

    @property
    def chosen(self) -> PrecisionPoint:
        """The point with which the run continued."""
        return next(point for point in self.points if point.chosen)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain containers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], metric: Metric = TOP1) -> Precision:
        """Returns the front from the result of `as_dict`, which may have been stored as JSON.

        In a report, the key of `metric` replaces `score`; both are read.
        """
        points = []
        for row in (with_score(row, metric) for row in stored["points"]):
            floats = row["floats"]
            points.append(
                PrecisionPoint(**{**row, "floats": None if floats is None else read_float_sites(floats)})
            )
        return cls(**{**stored, "points": tuple(points)})
