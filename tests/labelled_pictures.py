"""Small pictures with a label for each pixel, in the layout of CamVid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COLOURS = np.array([[30, 30, 40], [220, 60, 50], [50, 200, 80]], np.uint8)  # one per class
SIZE = (24, 32)  # height and width


def scene(draw: np.random.Generator, size: tuple[int, int] = SIZE) -> NDArray[np.uint8]:
    """Returns a label map with one rectangle for each class except the first."""
    height, width = size
    labels = np.zeros(size, np.uint8)
    for label in (1, 2):
        top, left = draw.integers(0, height - 10), draw.integers(0, width - 10)
        labels[top : top + draw.integers(6, 10), left : left + draw.integers(6, 10)] = label
    return labels


def picture(labels: NDArray[np.uint8]) -> Image.Image:
    """Returns the picture of a label map, with each pixel in the colour of its class."""
    return Image.fromarray(COLOURS[np.minimum(labels, 2)])


def folder(root: Path, train: int = 24, test: int = 8, size: tuple[int, int] = SIZE) -> Path:
    """Writes `train` and `test` pictures whose first row has the ignored label 9; returns their folder."""
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        (root / part).mkdir(parents=True)
        (root / f"{part}_labels").mkdir()
        for number in range(count):
            labels = scene(draw, size)
            picture(labels).save(root / part / f"{number:03}.png")
            labels[0] = 9
            Image.fromarray(labels).save(root / f"{part}_labels" / f"{number:03}.png")
    (root / "classes.txt").write_text("ground\nbrick\nleaf\n")
    return root
