"""Compares computations of the same outputs over all batches: how far they differ and how often they agree.

Every output is compared over all its values, floats in steps of their own scale; the worst output is
reported. Agreement is computed for the first float output with a class axis and for every integer output, and
the lowest one counts:

    [N, classes], [N, classes, H, W]   share of equal argmax along axis 1, per image or per position
    [N, T, classes]                    along the last axis
    [N, 1, H, W]                       share of values on the same side of 0
    integers                           share of equal values
    none of these ([N])                share of values less than a step apart

A task may define another rule for the first output: what it decides, or when two outputs are alike.

Different decisions are a tie if the reference's values for both answers are at most half a step apart,
because rounding to whole steps could change the decision as well. With a task's own rule, the largest
difference between the two outputs replaces that distance. `Comparison.ties` is the share of ties among all
decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from qatkit_verify.feeds import Array
from qatkit_verify.records import Comparison

_TIE = 0.5  # steps
Decide = Callable[[Array], Array]


@dataclass(frozen=True)
class Alike:
    """A rule for outputs that decide nothing by themselves, such as embeddings.

    Attributes:
        rule: returns whether two outputs [N, ...] are alike, row by row, as booleans [N].
    """

    rule: Callable[[Array, Array], Array]


@dataclass
class _Distance:
    """The distance of another computation from the reference in one output, updated batch by batch."""

    largest: float = 0.0
    total: float = 0.0
    equal: int = 0
    small: list[Array] = field(default_factory=list)  # differences of an output without classes
    lost: list[Array] = field(
        default_factory=list
    )  # the reference's margins of its own answers over the other computation's, where they differ

    def add(
        self, reference: Array, other: Array, decided: Array | None, decide: Decide | Alike | None
    ) -> None:
        difference = np.abs(reference.astype(np.float64) - other)
        self.largest = float(np.maximum(self.largest, difference.max(initial=0)))  # keeps NaN
        self.total += float(difference.sum())
        if isinstance(decide, Alike):
            self.equal += int(decide.rule(reference, other).sum())
        elif decided is None:
            self.small.append(difference.ravel())
        else:
            answers = _decisions(other) if decide is None else decide(other)
            self.equal += int((decided == answers).sum())
            if decide is not None:
                apart = difference.reshape(len(reference), -1).max(1, initial=0)
                differs = (decided != answers).reshape(len(reference), -1).any(1)
                self.lost.append(
                    apart[differs]
                )  # the task's rule gives no distance between answers; the outputs' distance replaces it
            elif reference.dtype.kind == "f":
                self.lost.append(_lost(reference, decided, answers))


class Output:
    """An output of the reference, and the distances of other computations from it.

    Args:
        others: the number of other computations.
        decide: the task's own rule: a function that returns what a batch of the output decides, or a rule
            for when two outputs are alike. None: the rules of this module.

    Attributes:
        floats: whether the output consists of floats.
        low, high: the smallest and the largest value of the reference so far; infinite if there is none.
    """

    def __init__(self, others: int, decide: Decide | Alike | None = None) -> None:
        self._decide = decide
        self.floats, self.low, self.high = False, np.inf, -np.inf
        self._count = self._decided = 0
        self._distances = [_Distance() for _ in range(others)]

    def add(self, reference: Array, others: Sequence[Array]) -> None:
        """Adds one batch of the output: the values of the reference, and of each other computation."""
        self.floats = reference.dtype.kind == "f"
        if reference.size:
            self.low, self.high = min(self.low, reference.min()), max(self.high, reference.max())
        self._count += reference.size
        decided = None
        if isinstance(self._decide, Alike):
            self._decided += len(reference)
        else:
            decided = _decisions(reference) if self._decide is None else self._decide(reference)
            self._decided += 0 if decided is None else decided.size
        for distance, other in zip(self._distances, others, strict=True):
            distance.add(reference, other.reshape(reference.shape), decided, self._decide)

    @property
    def span(self) -> float:
        """The range of the reference's values."""
        return float(self.high) - float(self.low) if self._count else 0.0

    @property
    def classes(self) -> bool:
        """Returns whether the output decides something: along a class axis, as integers, or by the task's rule."""
        return self._decided > 0

    def comparisons(self, step: float) -> list[Comparison]:
        """Returns one comparison per other computation; `step` is the size of a step of this output."""
        found = []
        for one in self._distances:
            mean = one.total / max(1, self._count)
            agreement = one.equal / self._decided if self.classes else _within(one.small, step)
            ties = sum(int((lost <= _TIE * step).sum()) for lost in one.lost) / max(1, self._decided)
            found.append(Comparison(agreement, one.largest, mean, one.largest / step, mean / step, ties))
        return found


def _within(differences: Sequence[Array], step: float) -> float:
    values = np.concatenate(differences) if differences else np.zeros(0)
    return float((values < step).mean()) if values.size else 1.0


def _lost(reference: Array, decided: Array, answers: Array | None) -> Array:
    """Returns the margin of the reference's answer over the other answer wherever the decisions differ.

    The margin is the difference between the reference's values for the two answers. For boolean decisions, it is
    the absolute value of the reference.
    """
    assert answers is not None
    places = decided != answers
    if decided.dtype == bool:
        return cast(Array, np.abs(reference[places].astype(np.float64)))
    by_class = np.moveaxis(reference, class_axis(reference.ndim), -1)[places].astype(np.float64)
    rows = np.arange(len(by_class))
    return cast(Array, by_class[rows, decided[places]] - by_class[rows, answers[places]])


def class_axis(axes: int) -> int:
    """Returns the class axis of an output: the last of three axes (a sequence), else axis 1."""
    return 2 if axes == 3 else 1


def _decisions(values: Array) -> Array | None:
    """Returns what an output decides, per image or per position; None for floats without a class axis."""
    if values.dtype.kind != "f":
        return values
    if values.ndim < 2:
        return None
    axis = class_axis(values.ndim)
    if values.shape[axis] == 1 and values.ndim > 2:
        return np.asarray(values > 0)
    return np.asarray(values.argmax(axis)) if values.shape[axis] else None


def deciding(outputs: Sequence[Output]) -> list[int]:
    """Returns the indices of the outputs whose agreement counts.

    They are the first float output with classes and all integer outputs; if there are none, the first output.
    """
    floats = [i for i, one in enumerate(outputs) if one.floats and one.classes]
    integers = [i for i, one in enumerate(outputs) if not one.floats]
    return sorted(floats[:1] + integers) or [0]
