"""Boxes as targets: they are scaled, cropped, placed and mirrored like their pictures.

Boxes and pictures draw from sources of random numbers in the same state, so both are placed and mirrored in
the same way. A box is dropped if less than a quarter of it remains in the input.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qatkit.data.preprocessing import Preprocessing
from qatkit.tasks.detection import VALUES
from qatkit_verify.fitting import Fitting, Sides, sides

_LEAST = 0.25  # minimum share of a box's area that must lie in the input

Array = NDArray[np.float64]


class BoxTargets:
    """The preparation of boxes, float32 [N, n, 6]: class, corners in pixels of the input, and a flag.

    The flag is 0 or, for boxes that are ignored, IGNORED or CROWD (`qatkit.tasks.average_precision`).

    Args:
        pictures: the preprocessing of the pictures.
        targets: targets of all pictures; n is their largest number of boxes, but at least 1. Unused rows have
            class -1.
    """

    def __init__(self, pictures: Preprocessing, targets: Iterable[Any]) -> None:
        self._pictures = pictures
        self._most = max((len(one) for one in targets if not isinstance(one, int)), default=0)

    def eval_targets(self, targets: Sequence[Any], pictures: Sequence[Sides]) -> Tensor:
        """Returns the boxes for evaluation; `pictures` are the (height, width) of the pictures."""
        hows = [self._pictures.fitting(picture) for picture in pictures]
        return self._batch(targets, pictures, hows, [False] * len(hows))

    def train_targets(
        self,
        targets: Sequence[Any],
        pictures: Sequence[Sides],
        augment: str,
        draws: Sequence[random.Random],
    ) -> Tensor:
        """Returns the boxes for training; `draws` are in the same state as when the pictures were prepared."""
        own = self._pictures
        hows, flips = [], []
        for picture, draw in zip(pictures, draws, strict=True):
            hows.append(own.zoomed(picture, draw) if augment == "scale_flip" else own.fitting(picture))
            flips.append(augment != "none" and draw.random() < 0.5)
        return self._batch(
            targets, pictures, hows, flips, within=augment == "flip" and own.fit == "letterbox"
        )

    def _batch(
        self,
        targets: Sequence[Any],
        pictures: Sequence[Sides],
        hows: Sequence[Fitting],
        flips: Sequence[bool],
        *,
        within: bool = False,
    ) -> Tensor:
        """Returns the boxes of a batch.

        Boxes with a true flip are mirrored: with `within` inside their picture, else inside the padded input.
        """
        found = np.full((len(targets), max(self._most, 1), VALUES), -1, np.float32)
        width = sides(self._pictures.image_size)[1]
        for rows, target, picture, how, flip in zip(found, targets, pictures, hows, flips, strict=True):
            boxes = np.array(target, np.float64).reshape(-1, VALUES)
            if flip and within:
                boxes = _mirrored(boxes, picture[1])
            boxes = _placed(boxes, picture, how)
            if flip and not within:
                boxes = _mirrored(boxes, width)
            rows[: len(boxes)] = boxes
        return torch.from_numpy(found)


def _mirrored(boxes: Array, width: int) -> Array:
    """Returns the boxes [n, 6], mirrored left to right within `width` pixels."""
    found = boxes.copy()
    found[:, 1], found[:, 3] = width - boxes[:, 3], width - boxes[:, 1]
    return found


def _placed(boxes: Array, picture: Sides, how: Fitting) -> Array:
    """Returns the boxes [n, 6] of a picture in pixels of the input, without those that lie mostly outside.

    A box remains if the input contains at least `_LEAST` of its area.
    """
    found = boxes.copy()
    for axis, columns in ((0, [2, 4]), (1, [1, 3])):
        moved = boxes[:, columns] * (how.scaled[axis] / picture[axis]) + (how.place[axis] - how.start[axis])
        found[:, columns] = moved
    whole = (found[:, 3:5] - found[:, 1:3]).prod(1)
    for axis, columns in ((0, [2, 4]), (1, [1, 3])):
        low, high = how.place[axis], how.place[axis] + how.kept[axis]
        found[:, columns] = found[:, columns].clip(low, high)
    left = (found[:, 3:5] - found[:, 1:3]).prod(1)
    kept: Array = found[left >= _LEAST * np.maximum(whole, 1e-12)]
    return kept
