"""Whether an error accumulates in a model's states: both files run freely, each with the states that it gave itself.

    float   start ─> step 0 ─ state ─> step 1 ─ state ─> ...
                        compared          compared
    int8    start ─> step 0 ─ state ─> step 1 ─ state ─> ...

Figures are of the first 10, 100, 1,000, ... steps of all sequences, and of all steps: of an error that accumulates they
become worse, of one that the model forgets they stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qatkit.progress import shown
from qatkit.records.results import Fidelity
from qatkit.tasks import Task
from qatkit.verify.fidelity import Distance, OutputDistance, finite
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array
from qatkit_verify.free_run import FreeRun, StepSequence

_FIRST, _GROWS = 10, 10


@dataclass(frozen=True)
class Horizon:
    """The first steps of every sequence.

    Attributes:
        steps: how many, at most.
        near: of the first output.
        outputs: figures of each output, as `OutputDistance` has them.
    """

    steps: int
    near: Fidelity
    outputs: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Drift:
    """How far a file has come from the float file.

    Attributes:
        sequences: how many there were.
        horizons: growing; the last one is of all steps.
    """

    sequences: int
    horizons: Sequence[Horizon]

    @property
    def near(self) -> Fidelity:
        """The first output over all steps; `images` are steps."""
        return self.horizons[-1].near

    def as_dict(self) -> dict[str, Any]:
        """Plain figures for report.json."""
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


class _Span:
    """What is added up of the steps between two horizons."""

    def __init__(self, task: Task, outputs: int) -> None:
        self.first, self.each = Distance(task), [OutputDistance() for _ in range(outputs)]

    def add(self, exact: Sequence[Array], found: Sequence[Array], step: int) -> None:
        self.first.add(finite("float", exact[0], step, "step"), finite("int8", found[0], step, "step"))
        for distance, a, b in zip(self.each, exact, found, strict=True):
            distance.add(a, b)

    def take(self, other: _Span) -> None:
        self.first.take(other.first)
        for distance, more in zip(self.each, other.each, strict=True):
            distance.take(more)


def drift(
    exact: FreeRun, found: FreeRun, sequences: Iterable[StepSequence], task: Task, progress: bool = False
) -> Drift:
    """Runs both files along the sequences.

    Args:
        exact: the float file.
        found: the other one.
        sequences: at least one step.
        task: whose decisions are compared.
        progress: whether a bar is shown.

    Raises:
        ConfigError: no step, or a state or the first output is NaN or infinite.
    """
    spans, longest, count = list[_Span](), 0, 0
    for (step, a, b), _ in shown(_steps(exact, found, sequences), "drift of states", progress, "steps"):
        place = _span_of(step)
        while len(spans) <= place:
            spans.append(_Span(task, len(a)))
        spans[place].add(a, b, step)
        longest, count = max(longest, step + 1), count + (step == 0)
    if not count:
        raise ConfigError("data.test_images", 0, "at least one step to compare files with their own states")
    whole, horizons = _Span(task, len(spans[0].each)), []
    for place, span in enumerate(spans):
        whole.take(span)
        outputs = [one.figures(name) for one, name in zip(whole.each, exact.outputs, strict=True)]
        horizons.append(Horizon(min(longest, _FIRST * _GROWS**place), whole.first.result(), outputs))
    return Drift(count, horizons)


def _steps(
    exact: FreeRun, found: FreeRun, sequences: Iterable[StepSequence]
) -> Iterator[tuple[tuple[int, list[Array], list[Array]], tuple[None]]]:
    """Yields the number of each step in its sequence, with the outputs of both files."""
    for sequence in sequences:
        exact.begin(sequence.start)
        found.begin(sequence.start)
        for step, inputs in enumerate(sequence.steps):
            yield (step, [*exact.step(inputs).values()], [*found.step(inputs).values()]), (None,)


def _span_of(step: int) -> int:
    """0 of the first 10 steps, 1 of the next 90, 2 of the next 900, ..."""
    return len(str(step)) - 1
