"""How a task shows samples in the report: truth, float and INT8 side by side.

    test samples ── differs ──> the few that differ most ── panels ──> report.html

A task that draws returns a `Drawing` of its own, one class in one file, from `Task.drawing`. The check
`qatkit.verify.checks.examples` chooses the samples and keeps what `panels` returns.
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
    """One test sample, and what both files say of it.

    Attributes:
        inputs: what the model is called with, of this sample: an array, or arrays by the names of the inputs.
        picture: the pixels that `inputs` was made of, uint8 [H, W, 3], as large as the model sees them; None of
            samples that are no pictures.
        target: as in a batch, of this sample; None where the data have no targets.
        exact: outputs of the float file, as `Task.joined` gives them, without the axis of the batch.
        found: those of the INT8 file.
        classes: names.
        label: what the exported file is, in a word or two: "INT8".
        sound: the preparation of recordings as model.json has it; None of other samples.
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
    """How samples of a task are drawn. A class without arguments.

    Attributes:
        measure: what `differs` is, in words that follow a share: "of the pixels get another class".
        looked_at: test samples of which the most different ones are drawn, at least.
    """

    measure = "of the decisions differ from float"
    looked_at = 64

    @abstractmethod
    def differs(self, exact: Array, found: Array) -> Array:
        """Returns the share in which the outputs [N, ...] of both files differ, [N]; the largest are drawn."""

    @abstractmethod
    def panels(self, sample: Sample) -> Sequence[Panel]:
        """Returns the panels of a sample, from left to right."""

    def legend(self, classes: Sequence[str]) -> Sequence[tuple[str, str]]:
        """Returns the name and the colour "#rrggbb" of everything that has one; by default nothing."""
        return ()


def palette(count: int) -> list[str]:
    """Returns colours that are easy to tell apart, "#rrggbb": hues in steps of the golden angle, in three shades."""
    import colorsys

    shades = ((0.62, 0.85), (0.85, 0.6), (0.45, 0.98))
    found = []
    for number in range(count):
        saturation, value = shades[number % len(shades)]
        parts = colorsys.hsv_to_rgb(number * 0.61803398875 % 1, saturation, value)
        found.append("#" + "".join(f"{round(255 * one):02x}" for one in parts))
    return found
