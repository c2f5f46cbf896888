"""Drawings of a task's samples in the report: truth, float and INT8 side by side.

    test samples ── differs ──> the few that differ most ── panels ──> report.html

A task with drawings returns its own `Drawing`, one class in one file, from `Task.drawing`. The check
`qatkit.verify.checks.examples` chooses the samples and stores the result of `panels`.
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
        inputs: the model's input for this sample: an array, or arrays by the names of the inputs.
        picture: the pixels from which `inputs` was made, uint8 [H, W, 3], in the model's size; None for
            samples that are not pictures.
        target: the sample's target, as in a batch; None where the data have no targets.
        exact: outputs of the float file, as returned by `Task.joined`, without the batch axis.
        found: outputs of the INT8 file.
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
    """The base class of drawings of a task's samples; a drawing takes no arguments.

    Attributes:
        measure: description of `differs`, to follow a share: "of the pixels get another class".
        looked_at: minimum number of test samples from which the most different ones are drawn.
    """

    measure = "of the decisions differ from float"
    looked_at = 64

    @abstractmethod
    def differs(self, exact: Array, found: Array) -> Array:
        """Returns the share [N] by which the outputs [N, ...] of both files differ; the largest are drawn."""

    @abstractmethod
    def panels(self, sample: Sample) -> Sequence[Panel]:
        """Returns the panels of a sample, from left to right."""

    def legend(self, classes: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Returns names and colours "#rrggbb" of the legend; by default none."""
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
