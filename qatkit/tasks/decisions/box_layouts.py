"""The layouts of boxes in the outputs of detectors, and functions that read them.

    "objectness"   [N, boxes, 4 + 1 + classes]               YOLOv5, YOLOX
    "classes"      [N, 4 + classes, boxes], or transposed    YOLOv8 and later
    "pair"         scores [N, boxes, classes], boxes [N, boxes, 4]   SSD, RetinaNet, DETR
    "final"        [N, boxes, 6]: corners, score, class      after non-maximum suppression

Each layout is first converted to rows [N, boxes, values] (`Layout.rows`); boxes are read from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit.tasks.decisions.matched_boxes import Boxes, suppressed

Array = NDArray[Any]
CENTER, CORNERS = "center", "corners"
_LARGEST_LOG = 10.0  # maximum logarithm of a side in strides; no picture reaches it


@dataclass(frozen=True)
class Layout:
    """The position and the meaning of boxes in the outputs of a model.

    Attributes:
        kind: one of the four layouts above.
        places: the index of the output with the rows; for "pair", the indices of the boxes and of the scores.
        transposed: whether the boxes are on the last axis.
        form: the meaning of a box's values, "center" (x, y, width, height) or "corners" (x1, y1, x2, y2).
        grids: the (stride, columns, rows) of each grid of cells from which the boxes are offsets, in order;
            () if the boxes are not offsets.
        background: the class for background; None if there is none.
        scores: the conversion of scores to probabilities: "as_they_are", "sigmoid" or "softmax".
    """

    kind: str
    places: tuple[int, ...] = (0,)
    transposed: bool = False
    form: str = CENTER
    grids: tuple[tuple[int, int, int], ...] = ()
    background: int | None = None
    scores: str = "as_they_are"

    def rows(self, outputs: Sequence[Array]) -> NDArray[np.float32]:
        """Returns rows [N, boxes, values] from all outputs of a model."""
        found = [np.asarray(outputs[place], np.float32) for place in self.places]
        joined = np.concatenate(found, 2) if len(found) > 1 else found[0]
        return np.ascontiguousarray(joined.swapaxes(1, 2)) if self.transposed else joined

    def boxes(self, rows: Array, least: float, overlap: float) -> Boxes:
        """Returns the boxes of one picture after non-maximum suppression, by descending score.

        Args:
            rows: the rows of one picture, [boxes, values], from `rows`.
            least: the score that a box must exceed.
            overlap: the IoU above which a box suppresses a box of the same class with a lower score.
        """
        values = np.asarray(rows, np.float64)
        if self.kind == "final":
            scores, classes = values[:, 4], values[:, 5].round().astype(np.int64)
        else:
            scores, classes = self._best(values)
        kept = scores > least
        corners = self._corners(values, kept)
        return suppressed(Boxes(corners, scores[kept], classes[kept]), overlap)

    def _best(self, values: Array) -> tuple[Array, NDArray[np.int64]]:
        by_class = _probabilities(values[:, 5 if self.kind == "objectness" else 4 :], self.scores)
        if self.background is not None:
            by_class = by_class.copy()
            by_class[:, self.background] = 0
        if self.kind == "objectness":
            raw = self.scores == "as_they_are"
            by_class = by_class * (values[:, 4:5] if raw else _probabilities(values[:, 4:5], "sigmoid"))
        classes = by_class.argmax(1)
        return by_class[np.arange(len(by_class)), classes], classes

    def _corners(self, values: Array, kept: NDArray[np.bool_]) -> Array:
        boxes = values[:, :4]
        if self.grids:
            cells, strides = _cells(self.grids)
            xy, wh = boxes[:, :2], boxes[:, 2:].clip(-_LARGEST_LOG, _LARGEST_LOG)
            boxes = np.concatenate([(xy + cells) * strides, np.exp(wh) * strides], 1)
        boxes = boxes[kept]
        if self.form == CORNERS:
            return boxes
        half = boxes[:, 2:] / 2
        return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], 1)


def _probabilities(values: Array, how: str) -> Array:
    if how == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-values.clip(-700, 700))))
    if how == "softmax":
        powers = np.exp(values - values.max(1, keepdims=True))
        return np.asarray(powers / powers.sum(1, keepdims=True))
    return values


def _cells(grids: Sequence[tuple[int, int, int]]) -> tuple[Array, Array]:
    """Returns column and row [boxes, 2] and stride [boxes, 1] of each cell, grid by grid and row by row."""
    cells, strides = [], []
    for stride, columns, rows in grids:
        y, x = np.mgrid[:rows, :columns]
        cells.append(np.stack([x, y], -1).reshape(-1, 2))
        strides.append(np.full((rows * columns, 1), stride))
    return np.concatenate(cells).astype(np.float64), np.concatenate(strides).astype(np.float64)


def grids_of(strides: Sequence[int], height: int, width: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the (stride, columns, rows) of the grids of a picture of `height` x `width` pixels."""
    return tuple((stride, -(-width // stride), -(-height // stride)) for stride in strides)


def cells_in(grids: Sequence[tuple[int, int, int]]) -> int:
    """Returns the number of cells in all grids."""
    return sum(columns * rows for _, columns, rows in grids)


def square(strides: Sequence[int], boxes: int) -> tuple[tuple[int, int, int], ...]:
    """Returns the grids of the square picture that has `boxes` cells in all; () if there is none."""
    largest = max(strides)
    for side in range(1, 400):
        grids = grids_of(strides, side * largest, side * largest)
        if cells_in(grids) >= boxes:
            return grids if cells_in(grids) == boxes else ()
    return ()


def offsets(rows: Array, grids: Sequence[tuple[int, int, int]]) -> bool:
    """Returns whether the centres of rows [N, boxes, values] are offsets from cells rather than pixels.

    They are offsets if this interpretation gives the smaller median distance from the centres of the cells.
    """
    cells, strides = _cells(grids)
    centers = np.asarray(rows[..., :2], np.float64)
    raw = np.median(np.abs(centers - 0.5))
    pixels = np.median(np.abs(centers / strides - cells - 0.5))
    return bool(raw < pixels)
