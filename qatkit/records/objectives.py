"""What a search may aim at: figures of a trial's file in ONNX Runtime, read from its report.json.

How good a file is, is read of the training images that were held out, by which trials are chosen; the same figures of
the test images (`of_test_images`) are for people to look at, once the choice is made.
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
_EQUAL = 200.0  # dB; outputs that differ anywhere have fewer


@dataclass(frozen=True)
class Objective:
    """One figure.

    Attributes:
        title: with its unit, for people.
        largest: whether more is better.
        digits: that are shown.
        read: None where it was not measured.
        unit: one of what is shown, in what is read.
        check: the name of what measures it.
        most: what a sampler gets where the figure is infinite.
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
        """Whether it is of the images held out, and other images would give another figure."""
        return self.check == VALIDATION

    def shown(self, found: Figures) -> float | None:
        """In the unit in which it is shown."""
        value = self.read(found)
        return None if value is None else value / self.unit


def objectives_of(task: TaskNames) -> dict[str, Objective]:
    """Returns the figures of a task's runs, by the names that they have in `search.objectives`."""
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


OBJECTIVES = objectives_of(NAMES)  # their names, and how they are measured, are those of every task


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
        """By how much it is missed; not above 0 where it is met."""
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
        allowed = f"one of {', '.join(OBJECTIVES)}{did_you_mean(name, OBJECTIVES, n=1)}"
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
    """Every figure that was measured and trials are chosen by, in the unit in which it is shown."""
    judged, own = validation_of(report), figures_of(report)
    return _measured({name: one.shown(judged if one.of_images else own) for name, one in OBJECTIVES.items()})


def of_test_images(report: Report) -> dict[str, float]:
    """Of the test images, which choose nothing."""
    own = figures_of(report)
    return _measured({name: one.shown(own) for name, one in OBJECTIVES.items() if one.of_images})


def _measured(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in found.items() if value is not None}


def finite(name: str, value: float) -> float:
    """Returns a figure as a sampler gets it: finite, since samplers compute volumes."""
    return min(value, OBJECTIVES[name].most)
