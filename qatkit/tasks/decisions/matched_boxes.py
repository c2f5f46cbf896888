"""Boxes of two models for the same picture: non-maximum suppression, overlaps and matches.

Boxes are corners [n, 4] (x1, y1, x2, y2) in any unit, with scores [n] and classes [n].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Boxes:
    """The boxes of one picture, by descending score.

    Attributes:
        corners: the corners, [n, 4].
        scores: the scores, [n].
        classes: the class numbers, [n].
    """

    corners: Array
    scores: Array
    classes: NDArray[np.int64]

    @property
    def count(self) -> int:
        """The number of boxes."""
        return len(self.scores)


def overlap(first: Array, second: Array) -> Array:
    """Returns the intersection over union [n, m] of corners [n, 4] and [m, 4]; 0 for two boxes without area."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    both = (high - low).clip(min=0).prod(2)
    areas = [(one[:, 2:] - one[:, :2]).clip(min=0).prod(1) for one in (first, second)]
    either = areas[0][:, None] + areas[1][None] - both
    return np.where(either > 0, both / np.where(either > 0, either, 1.0), 0.0)


def suppressed(boxes: Boxes, most: float) -> Boxes:
    """Returns the boxes by descending score, after non-maximum suppression within each class.

    A box is dropped if its IoU with a better box of the same class exceeds `most`.
    """
    order = np.argsort(-boxes.scores, kind="stable")
    corners, scores, classes = boxes.corners[order], boxes.scores[order], boxes.classes[order]
    kept = np.zeros(0, np.int64)
    for box in range(len(scores)):
        rivals = kept[classes[kept] == classes[box]]
        if not (overlap(corners[box : box + 1], corners[rivals]) > most).any():
            kept = np.append(kept, box)
    return Boxes(corners[kept], scores[kept], classes[kept])


def matches(exact: Boxes, found: Boxes, least: float) -> int:
    """Returns the number of matching pairs of boxes: same class and an IoU of at least `least`.

    Boxes of `found` are matched by descending score, each with the free box that it overlaps most.
    """
    near = overlap(found.corners, exact.corners)
    near[found.classes[:, None] != exact.classes[None]] = -1
    count = 0
    for row in near:
        if len(row) and (best := int(row.argmax())) >= 0 and row[best] >= least:
            near[:, best] = -1
            count += 1
    return count
