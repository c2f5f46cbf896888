"""A front of mixed precisions, as plain dataclasses, for the report and for later runs. Nothing here needs torch."""

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
    """One file of the front.

    Attributes:
        number: by which a later run asks for it (`precision.point`), 0 for the fastest.
        floats: sites of the operators that are float, in graph order; None of the float model itself.
        operators: how many of those that can be int8 are float.
        predicted_ms, ms: of one run, before and after it was measured; predicted from the files that were timed before.
        ratio: float's time over this one's.
        score: the task's main metric; None without labels.
        agreement: share of the images that are decided as by float.
        sqnr_db: of the outputs against float's; None: equal.
        chosen: whether the run went on with it.
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
        """For people."""
        if self.floats is None:
            return "float"
        return f"{self.operators} float" if self.floats else "int8"


@dataclass(frozen=True)
class Precision:
    """A front, the fastest point first, and how it came about.

    Attributes:
        points: none of them is beaten by another one in both time and error, but for int8 and float, which are always
            there.
        operators: of the model that can be int8.
        measured: files that were made and run, those that were beaten included.
        images: that judged them, held out of calibration.
        note: why this point was chosen.
        steps: of a model with states: those of calibration that each file took with its own states, which its agreement
            and its SQNR are of; 0 of other models.
    """

    points: Sequence[PrecisionPoint]
    operators: int
    measured: int
    images: int
    note: str
    steps: int = 0

    @property
    def chosen(self) -> PrecisionPoint:
        """The point that the run went on with."""
        return next(point for point in self.points if point.chosen)

    def as_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], metric: Metric = TOP1) -> Precision:
        """The inverse of `as_dict`, also of what was JSON in the meantime, or a report of a task with this metric."""
        points = []
        for row in (with_score(row, metric) for row in stored["points"]):
            floats = row["floats"]
            points.append(
                PrecisionPoint(**{**row, "floats": None if floats is None else read_float_sites(floats)})
            )
        return cls(**{**stored, "points": tuple(points)})
