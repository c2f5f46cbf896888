"""A study as plain data, for its table and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qatkit.records.objectives import Objective, objectives_of
from qatkit_verify.classification import NAMES
from qatkit_verify.records import TaskNames

STATES = ("complete", "pruned", "failed", "running")


@dataclass(frozen=True)
class Trial:
    """A run of a study.

    Attributes:
        number: the number of the trial, from 0.
        state: the state, one of STATES.
        values: the proposed values, by key.
        figures: the measured figures that decide, by objective; figures on images use the held-out images.
        tested: the same figures on the test images, which do not decide.
        epochs: the main metric of each epoch.
        feasible: whether every constraint is met.
        front: whether the trial is on the Pareto front of the trials that meet the constraints.
        attempts: the number of workers that started the trial; above 1 if some were killed.
        reason: the reason why the trial failed.
        shortfalls: the bounds of `verify` that its run misses.
        folder: the folder of the run, relative to that of the study.
    """

    number: int
    state: str
    values: Mapping[str, object] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    tested: Mapping[str, float] = field(default_factory=dict)
    epochs: Mapping[str, float] = field(default_factory=dict)
    feasible: bool = True
    front: bool = False
    attempts: int = 1
    reason: str = ""
    shortfalls: Sequence[str] = ()
    folder: str = ""


@dataclass(frozen=True)
class Study:
    """All trials of a study, and the number of requested trials.

    Attributes:
        wanted: the number of requested trials.
        possible: the number of different trials in the space.
        task: the task of the figures.
    """

    name: str
    objectives: Sequence[str]
    constraints: Sequence[str]
    trials: Sequence[Trial]
    wanted: int
    possible: int
    task: TaskNames = NAMES

    @property
    def known(self) -> dict[str, Objective]:
        """The available figures by name."""
        return objectives_of(self.task)

    @property
    def front(self) -> list[Trial]:
        """The trials on the front, the best in the first objective first."""
        found = [trial for trial in self.trials if trial.front]
        first = self.objectives[0]
        sign = -1 if self.known[first].largest else 1
        return sorted(found, key=lambda trial: (sign * trial.figures[first], trial.number))

    def told(self) -> str:
        """Returns the number of trials in each state as text."""
        counts = {state: sum(trial.state == state for trial in self.trials) for state in STATES}
        states = ", ".join(
            f"{count} {state}" for state, count in counts.items() if count or state == "complete"
        )
        count, most = len(self.trials), min(self.wanted, self.possible)
        head = f"{count} of {most} trials" if count <= most else f"{count} trials"
        if self.possible < self.wanted:
            head += f", all points of the space ({self.wanted} were requested)"
        elif count > most:  # the repeated command requests fewer trials
            head += f" ({most} requested now)"
        return f"{head}: {states}"
