"""Augmentations of training images; each image has its own source of random numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as nn_functional
from torch import Tensor

from qatkit_verify.fitting import Fitting, Sides

_CROP_AREA = (0.08, 1.0)  # share of the image's area, as in the usual ImageNet recipe
_CROP_RATIO = (3 / 4, 4 / 3)  # width / height, relative to that of the input
_CROP_ATTEMPTS = 10
_ZOOM = (0.5, 1.5)  # the usual range in the training of YOLO models


def mirrored(arrays: Iterable[Tensor], draws: Sequence[random.Random]) -> Iterator[Tensor]:
    """Yields images (channels, height, width), each mirrored left to right with probability one half."""
    for array, draw in zip(arrays, draws, strict=True):
        yield array.flip(-1) if draw.random() < 0.5 else array


def flipped(batch: Tensor, draws: Sequence[random.Random]) -> Tensor:
    """Mirrors each image of a batch left to right with probability one half, in place."""
    chosen = torch.tensor([draw.random() < 0.5 for draw in draws])
    batch[chosen] = batch[chosen].flip(-1)
    return batch


def shifted(batch: Tensor, draws: Sequence[random.Random]) -> Tensor:
    """Shifts each image by up to an eighth of its height and width either way, reflecting the edges."""
    height, width = batch.shape[-2:]
    down, across = height // 8, width // 8
    padded = nn_functional.pad(batch, [across, across, down, down], mode="reflect")
    corners = [(draw.randint(0, 2 * down), draw.randint(0, 2 * across)) for draw in draws]
    crops = [
        image[:, top : top + height, left : left + width]
        for image, (top, left) in zip(padded, corners, strict=True)
    ]
    return torch.stack(crops)


def random_rectangle(
    height: int, width: int, draw: random.Random, aspect: float = 1.0
) -> tuple[int, int, int, int]:
    """Returns a random rectangle (top, left, height, width), with area and proportions as in Inception training.

    If `_CROP_ATTEMPTS` drawn rectangles do not fit, the result is the largest centred rectangle with an
    allowed ratio.

    Args:
        height, width: size of the image.
        draw: the image's source of random numbers.
        aspect: width / height of the input to which the rectangle is resized.
    """
    low, high = (ratio * aspect for ratio in _CROP_RATIO)
    for _ in range(_CROP_ATTEMPTS):
        area = height * width * draw.uniform(*_CROP_AREA)
        ratio = aspect * math.exp(draw.uniform(*map(math.log, _CROP_RATIO)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return draw.randint(0, height - h), draw.randint(0, width - w), h, w
    w = min(width, max(1, round(height * high)))
    h = min(height, max(1, round(width / low)))
    return (height - h) // 2, (width - w) // 2, h, w


def random_zoom(scaled: Sides, size: Sides, draw: random.Random) -> Fitting:
    """Returns a fitting with a random zoom from 0.5 to 1.5 and a random position; proportions do not change.

    On each axis, the picture is cropped if it is larger than the input, and padded if it is smaller.

    Args:
        scaled: (height, width) of the picture at a zoom of 1.
        size: (height, width) of the input.
        draw: the picture's source of random numbers.
    """
    zoom = draw.uniform(*_ZOOM)
    high, wide = (max(2, round(side * zoom)) for side in scaled)
    rooms = (size[0] - high, size[1] - wide)
    drawn = [draw.randint(0, abs(room)) for room in rooms]
    start = [0 if room >= 0 else at for room, at in zip(rooms, drawn, strict=True)]
    place = [at if room >= 0 else 0 for room, at in zip(rooms, drawn, strict=True)]
    kept = (min(high, size[0]), min(wide, size[1]))
    return Fitting((high, wide), (start[0], start[1]), kept, (place[0], place[1]))
