"""The objectives of a search: figures of a trial's file in ONNX Runtime, read from its report.json.

Trials are chosen by figures on the held-out training images. The same figures on the test images
(`of_test_images`) are only shown after the choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qatkit.records.figures import VALIDATION, Figures, figures_of, validation_of
from qatkit_verify.classification import NAMES
from qatkit_verify.errors import ConfigError, did_you_mean
from qatkit_verify.records import TaskNames

Report = Mapping[str, Any]
_CONSTRAINT = re.compile(r"\s*([a-z]+)\s*(<=|>=)\s*(\S+)\s*")
_EQUAL = 200.0  # dB, more than for any outputs that differ


@dataclass(frozen=True)
class Objective:
    """A figure that a search can optimize.

    Attributes:
        title: the displayed name with its unit.
        largest: whether larger values are better.
        digits: the number of displayed decimals.
        read: a function that reads the figure; it returns None if the figure was not measured.
        unit: the size of the displayed unit, in the unit of `read`.
        check: the name of the check that measures the figure.
        most: the value for a sampler if the figure is infinite.
    """

    title: str
    largest: bool
    digits: int
    read: Callable[[Figures], float | None]
    unit: float = 1.0
    check: str = VALIDATION
    most: float = math.inf

    @property
    def of_images(self) -> bool:
        """Returns whether the figure depends on the held-out images."""
        return self.check == VALIDATION

    def shown(self, found: Figures) -> float | None:
        """Returns the figure in the unit in which it is shown."""
        value = self.read(found)
        return None if value is None else value / self.unit


def objectives_of(task: TaskNames) -> dict[str, Objective]:
    """Returns the figures of a task's runs by their names in `search.objectives`."""
    main = task.main
    title = f"{main.name}, {main.unit}" if main.unit else main.name
    return {
        "accuracy": Objective(title, main.higher_is_better, 2, lambda one: one.score),
        "drop": Objective(f"{main.name} lost, {main.points}", False, 2, lambda one: one.drop),
        "agreement": Objective(f"same {task.decision} as float", True, 4, lambda one: one.agreement),
        "sqnr": Objective("SQNR, dB", True, 2, lambda one: one.sqnr_db, most=_EQUAL),
        "latency": Objective("ms", False, 4, lambda one: one.latency_ms, check="latency"),
        "speedup": Objective("speedup", True, 3, lambda one: one.ratio, check="latency"),
        "size": Objective("MB", False, 3, lambda one: one.bytes, unit=1e6, check="size"),
    }


OBJECTIVES = objectives_of(NAMES)  # their names and measurement are the same for every task


@dataclass(frozen=True)
class Constraint:
    """A bound on a figure, in the unit in which it is shown."""

    name: str
    largest: bool  # whether `bound` is the largest allowed value
    bound: float

    @property
    def key(self) -> str:
        """The bound as text in a normal form."""
        return f"{self.name}{'<=' if self.largest else '>='}{self.bound:g}"

    def excess(self, figures: Mapping[str, float]) -> float:
        """Returns by how much the bound is missed; at most 0 if it is met."""
        value = figures[self.name]
        return value - self.bound if self.largest else self.bound - value


def check_objectives(names: Sequence[str]) -> None:
    """Raises ConfigError if there are no names, or a name is not an objective or occurs twice."""
    for name in names:
        if name not in OBJECTIVES:
            allowed = f"one of {', '.join(OBJECTIVES)}{did_you_mean(name, OBJECTIVES, n=1)}"
            raise ConfigError("search.objectives", name, allowed)
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            "search.objectives", f"[{', '.join(names)}]", f"one or more of {', '.join(OBJECTIVES)}, each once"
        )


def constraints(texts: Sequence[str]) -> list[Constraint]:
    """Returns the bounds that are written in `search.constraints`.

    Raises:
        ConfigError: a text is not a bound, or it names no figure.
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
                "search.constraints", text, "FIGURE<=NUMBER or FIGURE>=NUMBER, such as accuracy>=97"
            )
        if parts[1] not in OBJECTIVES:
            near = did_you_mean(parts[1], OBJECTIVES, n=1)
            raise ConfigError("search.constraints", text, f"a bound on one of {', '.join(OBJECTIVES)}{near}")
        found.append(Constraint(parts[1], parts[2] == "<=", bound))
    return found


def figures(report: Report) -> dict[str, float]:
    """Returns all measured figures by which trials are chosen, in their displayed units."""
    judged, own = validation_of(report), figures_of(report)
    return _measured({name: one.shown(judged if one.of_images else own) for name, one in OBJECTIVES.items()})


def of_test_images(report: Report) -> dict[str, float]:
    """Returns the figures on the test images, which do not affect choices."""
    own = figures_of(report)
    return _measured({name: one.shown(own) for name, one in OBJECTIVES.items() if one.of_images})


def _measured(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in found.items() if value is not None}


def finite(name: str, value: float) -> float:
    """Limits a figure to a finite value for a sampler, which may compute hypervolumes from it."""
    return min(value, OBJECTIVES[name].most)
