"""Boxes whose rows have no fixed place in the image, as in a two-stage detector, which sorts by objectness.

Rounding may change the order of proposals and thus shift many rows. Each proposal of one output is therefore
compared with the proposal of the other that overlaps it most. K proposals with C classes are K * C rows; row
k * C + c has a score only in class c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qatkit.tasks.decisions.matched_boxes import overlap

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
_SAME_OBJECT = 0.5  # minimum overlap (IoU) at which a box learns from a box of the teacher


def are_unordered(scores: Array) -> bool:
    """Returns whether the rows of scores [N, boxes, classes] belong to unordered proposals.

    Row k * classes + c then has a score only in class c. With a single class this cannot be decided, so the
    rows count as ordered.
    """
    boxes, classes = scores.shape[1:]
    if classes == 1 or boxes % classes:
        return False
    others = np.arange(boxes)[:, None] % classes != np.arange(classes)
    return not (scores * others).any()


def in_order_of(exact: Array, found: Array) -> Array:
    """Returns `found` with its proposals in the order of the matching proposals of `exact`.

    Proposals of `exact` are matched by descending score, each with the remaining proposal that it overlaps
    most. Those without overlap get the proposals that are left.

    Args:
        exact, found: the corners and the score of each class, [N, proposals * classes, 4 + classes].
    """
    classes = exact.shape[2] - 4
    return np.stack([_ordered(one, other, classes) for one, other in zip(exact, found, strict=True)])


def _ordered(exact: Array, found: Array, classes: int) -> Array:
    first, second = (one.reshape(-1, classes, one.shape[1]) for one in (exact, found))
    near = overlap(*(one[..., :4].mean(1).astype(np.float64) for one in (first, second)))
    places = np.full(len(first), -1)
    for row in np.argsort(-first[..., 4:].max((1, 2)), kind="stable"):
        best = int(near[row].argmax())
        if near[row, best] > 0:
            places[row], near[:, best] = best, -1.0
    places[places < 0] = np.setdiff1d(np.arange(len(second)), places)
    rows: Array = second[places].reshape(found.shape)
    return rows


def nearest(output: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the teacher's row of the same class with the largest overlap for each row of `output`, and a mask.

    The mask [N, rows] marks the rows whose overlap (IoU) is at least 0.5, enough to learn from.

    Args:
        output, teacher: the corners and scores, [N, proposals * classes, 4 + classes].
    """
    import torch
    from torchvision.ops import box_iou

    classes = output.shape[2] - 4
    rows, same = torch.empty_like(output), torch.empty_like(output[..., 0], dtype=torch.bool)
    for image, (ours, theirs) in enumerate(zip(output.detach(), teacher, strict=True)):
        for label in range(classes):
            overlaps, places = box_iou(ours[label::classes, :4], theirs[label::classes, :4]).max(1)
            rows[image, label::classes] = theirs[label::classes][places]
            same[image, label::classes] = overlaps >= _SAME_OBJECT
    return rows, same
