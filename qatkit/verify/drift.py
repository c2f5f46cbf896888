"""Measures whether an error accumulates in a model's states when each file runs on its own states.

    float   start ─> step 0 ─ state ─> step 1 ─ state ─> ...
                        compared          compared
    int8    start ─> step 0 ─ state ─> step 1 ─ state ─> ...

There are figures for the first 10, 100, 1,000, ... steps of each sequence, and for all steps. They get worse
with more steps if an error accumulates, and stay the same if the model forgets it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qatkit.progress import shown
from qatkit.records.results import Fidelity
from qatkit.tasks import Task
from qatkit.verify.fidelity import Distance, OutputDistance, finite
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array
from qatkit_verify.free_run import FreeRun, StepSequence
from qatkit_verify.session import open_session

_STEPS = (10, 100, 1000, 10_000, 100_000, math.inf)


@dataclass(frozen=True)
class Horizon:
    """Figures over the first steps of every sequence.

    Attributes:
        steps: the number of steps; shorter sequences contribute all their steps.
        near: the fidelity of the first output.
        outputs: the figures of each output, as returned by `OutputDistance`.
    """

    steps: int
    near: Fidelity
    outputs: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Drift:
    """The distance of a file from the float file in free runs.

    Attributes:
        sequences: the number of sequences.
        horizons: the figures for growing numbers of steps; the last ones cover all steps.
    """

    sequences: int
    horizons: Sequence[Horizon]

    @property
    def near(self) -> Fidelity:
        """The fidelity of the first output over all steps; `images` counts steps."""
        return self.horizons[-1].near

    def as_dict(self) -> dict[str, Any]:
        """Returns plain figures for report.json."""
        horizons = [
            {
                "steps": one.steps,
                "counted": one.near.images,
                "agreement": one.near.agreement,
                "outputs": list(one.outputs),
            }
            for one in self.horizons
        ]
        return {"sequences": self.sequences, "horizons": horizons}


class _Horizon:
    """The running sums over the first steps of every sequence."""

    def __init__(self, task: Task, outputs: int) -> None:
        self.task, self.first = task, Distance(task)
        self.each = [OutputDistance() for _ in range(outputs)]

    def add(self, exact: Sequence[Array], found: Sequence[Array], step: int) -> None:
        joined = [self.task.joined(one) for one in (exact, found)]
        self.first.add(finite("float", joined[0], step, "step"), finite("int8", joined[1], step, "step"))
        for distance, a, b in zip(self.each, exact, found, strict=True):
            distance.add(a, b)


def drift_of_files(
    files: Sequence[Path],
    states: Mapping[str, str],
    sequences: Iterable[StepSequence],
    task: Task,
    *,
    threads: int,
    options: Mapping[str, str] | None = None,
    progress: bool = False,
) -> Drift:
    """Returns the drift of the second file from the first, which is float.

    Args:
        files: the float file, and the file to compare with it.
        states: the output that feeds each state input in the next step, by input name.
        sequences, task, progress: as in `drift`.
        threads, options: the number of threads and the config entries of the sessions.

    Raises:
        ConfigError: as in `drift`, or ONNX Runtime cannot load a file.
    """
    sessions = [open_session(path, threads=threads, options=options) for path in files]
    names = [one.name for one in sessions[0].get_outputs()]
    exact, found = (FreeRun(one, states, outputs=names) for one in sessions)
    return drift(exact, found, sequences, task, progress)


def drift(
    exact: FreeRun, found: FreeRun, sequences: Iterable[StepSequence], task: Task, progress: bool = False
) -> Drift:
    """Runs both files along the sequences and returns the drift between them.

    Args:
        exact: the float file.
        found: the file to compare with it.
        sequences: the sequences, with at least one step in total.
        task: the task whose decisions are compared.
        progress: whether to show a progress bar.

    Raises:
        ConfigError: there is no step, or a state or the first output is NaN or infinite.
    """
    longest, count = 0, 0
    horizons = [_Horizon(task, len(exact.outputs)) for _ in _STEPS]
    for (step, a, b), _ in shown(_steps(exact, found, sequences), "drift of states", progress, "steps"):
        for steps, horizon in zip(_STEPS, horizons, strict=True):
            if step < steps:
                horizon.add(a, b, step)
        longest, count = max(longest, step + 1), count + (step == 0)
    if not count:
        raise ConfigError("data.test_images", 0, "at least one step to compare files with their own states")
    needed = next(place for place, steps in enumerate(_STEPS) if longest <= steps) + 1
    return Drift(
        count,
        [
            Horizon(
                int(min(longest, steps)),
                one.first.result(),
                [each.figures(name) for each, name in zip(one.each, exact.outputs, strict=True)],
            )
            for steps, one in zip(_STEPS[:needed], horizons, strict=False)
        ],
    )


def _steps(
    exact: FreeRun, found: FreeRun, sequences: Iterable[StepSequence]
) -> Iterator[tuple[tuple[int, list[Array], list[Array]], tuple[None]]]:
    """Yields each step's number in its sequence with the outputs of both files, as a batch without labels."""
    for sequence in sequences:
        exact.begin(sequence.start)
        found.begin(sequence.start)
        for step, inputs in enumerate(sequence.steps):
            yield (step, [*exact.step(inputs).values()], [*found.step(inputs).values()]), (None,)
