"""Drawings of a task's samples in the report: truth, float and INT8 side by side.

    test samples ── differs ──> the samples that differ most ── panels ──> report.html

A task with drawings returns its own `Drawing` from `Task.drawing`; each drawing is one class in one file. The
check `qatkit.verify.checks.examples` chooses the samples and stores the result of `panels`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qatkit.records.examples import Panel

if TYPE_CHECKING:
    from qatkit.tasks.base import Array


@dataclass(frozen=True)
class Sample:
    """A test sample with the outputs of both files.

    Attributes:
        inputs: the model's input for this sample, an array or a mapping of arrays by the names of the inputs.
        picture: the pixels from which `inputs` was computed, uint8 [H, W, 3] at the model's size; None for
            samples that are not pictures.
        target: the sample's target, as in a batch; None if the data have no targets.
        exact: the outputs of the float file, as returned by `Task.joined`, without the batch axis.
        found: the outputs of the INT8 file, in the same shape.
        classes: names of the classes.
        label: a short name of the exported file, such as "INT8".
        sound: the preprocessing of recordings, as in model.json; None for other samples.
    """

    inputs: Any
    picture: Array | None
    target: Any
    exact: Array
    found: Array
    classes: Sequence[str]
    label: str
    sound: Mapping[str, Any] | None = None


class Drawing(ABC):
    """The base class of drawings of a task's samples; a drawing is built without arguments.

    Attributes:
        measure: a description of `differs` that follows a percentage, such as "of the pixels get another
            class".
        looked_at: minimum number of test samples that are compared; those that differ most are drawn.
    """

    measure = "of the decisions differ from float"
    looked_at = 64

    @abstractmethod
    def differs(self, exact: Array, found: Array) -> Array:
        """Returns the share by which the outputs [N, ...] of both files differ, [N]."""

    @abstractmethod
    def panels(self, sample: Sample) -> Sequence[Panel]:
        """Returns the panels of a sample, from left to right."""

    def legend(self, classes: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Returns the names and colours "#rrggbb" of the legend; empty by default."""
        return ()


def palette(count: int) -> list[str]:
    """Returns distinct colours "#rrggbb": hues in steps of the golden angle, in three shades."""
    import colorsys

    shades = ((0.62, 0.85), (0.85, 0.6), (0.45, 0.98))
    found = []
    for number in range(count):
        saturation, value = shades[number % len(shades)]
        parts = colorsys.hsv_to_rgb(number * 0.61803398875 % 1, saturation, value)
        found.append("#" + "".join(f"{round(255 * one):02x}" for one in parts))
    return found
