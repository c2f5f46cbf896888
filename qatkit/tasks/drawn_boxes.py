"""Drawings of a detector's boxes on the picture: truth, float and INT8 side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qatkit.records.examples import Panel, Shape, box, photograph
from qatkit.tasks.drawing import Drawing, Sample, palette

if TYPE_CHECKING:
    from qatkit.tasks.base import Array

_SCORE = 0.3  # minimum score of a drawn box, as for agreement
_SAME = 0.5  # overlap (IoU) from which two boxes are the same


class DrawnBoxes(Drawing):
    """A drawing of the boxes with a score above 0.3, in the colours of their classes."""

    measure = "of the float and INT8 boxes have no match in the other file"

    def differs(self, exact: Array, found: Array) -> Array:
        import numpy as np

        from qatkit.tasks.average_precision import detections
        from qatkit.tasks.decisions.matched_boxes import matches

        shares = []
        for pair in zip(exact, found, strict=True):
            first, second = (detections(rows, _SCORE) for rows in pair)
            both = first.count + second.count
            shares.append(1 - 2 * matches(first, second, _SAME) / both if both else 0.0)
        return np.array(shares)

    def panels(self, sample: Sample) -> Sequence[Panel]:
        if sample.picture is None:
            return []
        drawn = [
            photograph(title, sample.picture, _found(rows))
            for title, rows in (("float", sample.exact), (sample.label, sample.found))
        ]
        if sample.target is not None:
            drawn.insert(
                0, photograph("truth", sample.picture, _labelled(sample.target, sample.exact.shape[1] - 4))
            )
        return drawn

    def legend(self, classes: Sequence[str]) -> Sequence[tuple[str, str]]:
        return list(zip(classes, palette(len(classes)), strict=True))


def _found(rows: Array) -> list[Shape]:
    from qatkit.tasks.average_precision import detections

    colours, boxes = palette(rows.shape[1] - 4), detections(rows, _SCORE)
    every = zip(boxes.corners.tolist(), boxes.scores.tolist(), boxes.classes.tolist(), strict=True)
    return [
        box(x1, y1, x2, y2, colours[label], f"{100 * score:.0f}") for (x1, y1, x2, y2), score, label in every
    ]


def _labelled(target: Array, classes: int) -> list[Shape]:
    colours = palette(classes)
    rows = (row for row in target.tolist() if row[0] >= 0)
    return [box(x1, y1, x2, y2, colours[int(label)]) for label, x1, y1, x2, y2, _ in rows]
