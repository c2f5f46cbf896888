"""Drawings of class maps as coloured panels: picture, truth, float, INT8, and where the last two differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qatkit.records.examples import Panel, coloured, photograph
from qatkit.tasks.drawing import Drawing, Sample, palette
from qatkit.tasks.segmentation import IGNORED

if TYPE_CHECKING:
    from qatkit.tasks.base import Array

_UNLABELLED, _SAME, _OTHER = "#000000", "#d9dee5", "#c01c28"


class ClassMaps(Drawing):
    """A drawing in which each pixel has the colour of its class; unlabelled pixels are black."""

    measure = "of the pixels have another class than in float"

    def differs(self, exact: Array, found: Array) -> Array:
        other: Array = (exact.argmax(1) != found.argmax(1)).mean((1, 2))
        return other

    def panels(self, sample: Sample) -> Sequence[Panel]:
        import numpy as np

        classes = sample.exact.shape[0]
        colours = [*palette(classes), _UNLABELLED]
        maps = [one.argmax(0) for one in (sample.exact, sample.found)]
        drawn = [coloured("float", maps[0], colours), coloured(sample.label, maps[1], colours)]
        if sample.target is not None:
            truth = np.where(sample.target == IGNORED, classes, sample.target)
            drawn.insert(0, coloured("truth", truth, colours))
        if sample.picture is not None:
            drawn.insert(0, photograph("picture", sample.picture))
        return [*drawn, coloured("where they differ", maps[0] != maps[1], (_SAME, _OTHER))]

    def legend(self, classes: Sequence[str]) -> Sequence[tuple[str, str]]:
        return [*zip(classes, palette(len(classes)), strict=True), ("unlabelled", _UNLABELLED)]
