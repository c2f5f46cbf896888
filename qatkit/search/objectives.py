"""What a search may aim at, each read from the report.json of a trial: figures of the file in ONNX Runtime."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qatkit_verify.errors import ConfigError, near_matches

Report = Mapping[str, Any]
_CONSTRAINT = re.compile(r"\s*([a-z]+)\s*(<=|>=)\s*(\S+)\s*")


@dataclass(frozen=True)
class Objective:
    """One figure.

    Attributes:
        title: with its unit, for people.
        largest: whether more is better.
        digits: that are shown.
        read: from a report; None where it was not measured.
        unit: one of what is shown, in what is read.
    """

    title: str
    largest: bool
    digits: int
    read: Callable[[Report], float | None]
    unit: float = 1.0


def _of_file(group: str, name: str) -> Callable[[Report], float | None]:
    """`name` in `report[group]["int8"]`."""

    def read(report: Report) -> float | None:
        found = report.get(group, {}).get("int8")
        return None if found is None else found.get(name)

    return read


def _drop(report: Report) -> float | None:
    ours, floats = (report.get("accuracy", {}).get(key) for key in ("int8", "float"))
    return None if ours is None or floats is None else floats["top1"] - ours["top1"]


def _size(report: Report) -> float | None:
    size = report.get("sizes", {}).get("int8")
    return None if size is None else float(size)


OBJECTIVES = {
    "accuracy": Objective("top-1, %", True, 2, _of_file("accuracy", "top1")),
    "drop": Objective("top-1 lost, points", False, 2, _drop),
    "agreement": Objective("same top-1 as float", True, 4, _of_file("fidelity", "agreement")),
    "sqnr": Objective("SQNR, dB", True, 2, _of_file("fidelity", "sqnr_db")),
    "latency": Objective("ms", False, 4, _of_file("latency", "median_ms")),
    "speedup": Objective("speedup", True, 3, _of_file("latency", "ratio")),
    "size": Objective("MB", False, 3, _size, unit=1e6),
}


@dataclass(frozen=True)
class Constraint:
    """A bound on a figure, in the unit in which it is shown."""

    name: str
    largest: bool  # whether `bound` is the largest value allowed
    bound: float

    @property
    def key(self) -> str:
        """As it is written, in one way."""
        return f"{self.name}{'<=' if self.largest else '>='}{self.bound:g}"

    def excess(self, figures: Mapping[str, float]) -> float:
        """By how much it is not kept; not above 0 where it is."""
        value = figures[self.name]
        return value - self.bound if self.largest else self.bound - value


def check_objectives(names: Sequence[str]) -> None:
    """Raises ConfigError for names that are no objectives."""
    for name in names:
        _known("search.objectives", name)
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            "search.objectives", list(names), f"one or several of {', '.join(OBJECTIVES)}, each once"
        )


def _known(key: str, name: str) -> None:
    if name not in OBJECTIVES:
        allowed = f"one of {', '.join(OBJECTIVES)} (near it: {near_matches(name, OBJECTIVES, n=1)})"
        raise ConfigError(key, name, allowed)


def constraints(texts: Sequence[str]) -> list[Constraint]:
    """The bounds that `search.constraints` writes.

    Raises:
        ConfigError: a text that is none.
    """
    found = []
    for text in texts:
        parts = _CONSTRAINT.fullmatch(text)
        try:
            bound = float(parts[3]) if parts else None
        except ValueError:
            bound = None
        if parts is None or bound is None or not math.isfinite(bound):
            raise ConfigError(
                "search.constraints", text, "FIGURE<=NUMBER or FIGURE>=NUMBER: accuracy>=97, size<=3.5"
            )
        _known("search.constraints", parts[1])
        found.append(Constraint(parts[1], parts[2] == "<=", bound))
    return found


def figures(report: Report) -> dict[str, float]:
    """Every figure that was measured, in the unit in which it is shown."""
    read = {name: one.read(report) for name, one in OBJECTIVES.items()}
    return {name: value / OBJECTIVES[name].unit for name, value in read.items() if value is not None}
