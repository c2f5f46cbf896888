"""The search for boxes in the outputs of a detector.

Shapes and values of the outputs determine what the user's arguments leave open. If anything remains ambiguous,
an error asks the user to set it; `sure` returns whether nothing is ambiguous.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qatkit.tasks.decisions.base import MisfitError, Seen
from qatkit.tasks.decisions.box_layouts import CENTER, CORNERS, Layout, cells_in, grids_of, offsets, square

if TYPE_CHECKING:
    from qatkit.tasks.decisions.boxes import BoxRequest

Array = NDArray[Any]
_STRIDES = (8, 16, 32)
_TAKES = (
    "outputs [N, boxes, 4 + 1 + classes], [N, 4 + classes, boxes], [N, boxes, 6], or scores [N, boxes, classes] and "
    "boxes [N, boxes, 4]"
)
_SLACK = 1e-3  # amount by which a probability may exceed 0..1
_FEWEST = 10  # minimum number of boxes for conclusions from values
_BOXES, _SCORES = ("box",), ("score", "conf", "class", "prob", "cls")  # parts of the names of outputs


def found(asked: BoxRequest, seen: Seen) -> Layout:
    """Returns the layout of the boxes.

    Raises:
        MisfitError: the outputs are not a detector's, or something is ambiguous and the user did not set it.
    """
    layout = _placed(asked, seen)
    rows = layout.rows(seen.outputs)
    layout = replace(layout, form=_form(asked, layout, rows), scores=asked.scores)
    layout = replace(layout, grids=_grids(asked, layout, rows))
    _check_scores(layout, rows)
    if layout.form == CENTER and not layout.grids and (rows[..., 2:4] < 0).mean() > 0.01:
        raise MisfitError(
            "boxes(strides=8/16/32,size=HEIGHTxWIDTH) if the negative widths and heights are offsets from cells, or"
            f" boxes(form={CORNERS}) if they are corners"
        )
    return replace(layout, background=_background(asked, layout, rows))


def possible(seen: Seen) -> bool:
    """Returns whether outputs of these shapes fit some layout."""
    return bool(_singles(seen) or _pairs(seen))


def sure(seen: Seen) -> bool:
    """Returns whether the outputs are boxes and their layout is clear.

    This requires the shape of a detector's outputs, many boxes, scores within 0..1, and, depending on the layout:

    "pair"        corners: x1 <= x2 and y1 <= y2 in every row, but the four values of some row do not ascend; or
                  an output of positive values that is named like boxes
    "final"       corners as for "pair", and a class that is a whole number
    "classes"     boxes on the last axis, with positive sizes in pixels; their number is a multiple of 21, as is
                  the number of cells of strides 8, 16 and 32
    "objectness"  as many boxes as a square picture has cells, as offsets from these; or three times as many, in
                  pixels, with positive sizes
    """
    pairs = _pairs(seen)
    if pairs:
        return len(pairs) == 1 and _sure_pair(seen, *pairs[0])
    singles = _singles(seen)
    if not singles or singles[0] != 0:
        return False
    rows, transposed = _oriented(seen.first)
    if rows.shape[1] < _FEWEST:
        return False
    boxes, scores = rows[..., :4], rows[..., 4:]
    if _final(rows):
        return _surely_corners(boxes)
    if not _within(scores) or _within(boxes):
        return False
    positive = bool((boxes[..., 2:] > 0).all())
    if transposed:
        return positive and rows.shape[1] % 21 == 0 and rows.shape[2] >= 5
    return _raw(rows) or (positive and _three_anchors(rows))


def _placed(asked: BoxRequest, seen: Seen) -> Layout:
    """Returns a layout with its kind, places and orientation; the caller adds the rest.

    Raises:
        MisfitError: no outputs fit the requested layout.
    """
    pairs, singles = _pairs(seen), _singles(seen)
    if asked.layout == "pair" or (asked.layout == "auto" and pairs):
        if len(pairs) != 1:
            raise MisfitError("one output [N, boxes, 4] named like boxes, and one [N, boxes, classes]")
        return Layout("pair", pairs[0])
    if not singles:
        raise MisfitError(_TAKES)
    rows, transposed = _oriented(seen.outputs[singles[0]])
    kind = asked.layout if asked.layout != "auto" else _kind(rows, transposed)
    least = {"final": 6, "objectness": 6}.get(kind, 5)
    if rows.shape[2] < least or (kind == "final" and rows.shape[2] != least):
        number = "6" if kind == "final" else f"at least {least}"
        raise MisfitError(f"outputs with {number} values per box for layout={kind}")
    return Layout(kind, (singles[0],), transposed)


def _kind(rows: Array, transposed: bool) -> str:
    if _final(rows):
        return "final"
    if transposed:
        return "classes"
    if rows.shape[2] == 5:
        return "classes"
    if _raw(rows) or _three_anchors(rows):
        return "objectness"
    raise MisfitError(
        "boxes(layout=objectness) if the fifth value is an objectness, else boxes(layout=classes)"
    )


def _singles(seen: Seen) -> list[int]:
    """Returns the indices of the outputs that may contain both boxes and scores."""
    return [
        place
        for place, one in enumerate(seen.outputs)
        if one.ndim == 3 and one.shape[0] == seen.samples and _oriented(one)[0].shape[2] >= 5
    ]


def _pairs(seen: Seen) -> list[tuple[int, int]]:
    """Returns the indices (boxes, scores) of outputs that may be boxes and their scores.

    If several pairs fit, those with fitting names are returned.
    """
    fitting = [
        place for place, one in enumerate(seen.outputs) if one.ndim == 3 and one.shape[0] == seen.samples
    ]
    pairs = [
        (boxes, scores)
        for boxes, scores in itertools.permutations(fitting, 2)
        if seen.outputs[boxes].shape[2] == 4 and seen.outputs[boxes].shape[1] == seen.outputs[scores].shape[1]
    ]
    for words, place in ((_BOXES, 0), (_SCORES, 1)):
        named = [pair for pair in pairs if _named(seen, pair[place], words)]
        pairs = named if len(pairs) > 1 and named else pairs
    return pairs


def _named(seen: Seen, place: int, words: Sequence[str]) -> bool:
    return any(word in seen.names[place].lower() for word in words)


def _oriented(output: Array) -> tuple[Array, bool]:
    """Returns [N, boxes, values], and whether the boxes were on the last axis, which is then the longer one."""
    transposed = output.shape[2] > output.shape[1] >= 5
    return (output.swapaxes(1, 2) if transposed else output), transposed


def _within(values: Array) -> bool:
    """Returns whether all values are within 0..1, up to rounding errors."""
    return bool(values.min(initial=0) >= -_SLACK and values.max(initial=0) <= 1 + _SLACK)


def _ordered(boxes: Array) -> bool:
    """Returns whether x1 <= x2 and y1 <= y2 in every row."""
    return bool((boxes[..., 2:4] >= boxes[..., :2]).all())


def _surely_corners(boxes: Array) -> bool:
    """Returns whether the values are clearly corners.

    This requires x1 <= x2 and y1 <= y2 in every row, an area in enough rows, and a row whose four values do not
    ascend.
    """
    around = (boxes[..., 2:] > boxes[..., :2]).all(-1).sum() >= _FEWEST
    return _ordered(boxes) and bool(around) and not (np.diff(boxes, axis=-1) >= 0).all()


def _final(rows: Array) -> bool:
    """Returns whether rows may consist of corners, a score and a class."""
    if rows.shape[2] != 6 or not _within(rows[..., 4]) or not _ordered(rows[..., :4]):
        return False
    classes = rows[..., 5]
    return bool((classes == np.rint(classes)).all() and classes.min(initial=0) >= 0)


def _raw(rows: Array) -> bool:
    """Returns whether the boxes are offsets from the cells of a square picture."""
    grids = square(_STRIDES, rows.shape[1])
    return len(grids) > 0 and rows.shape[1] > 21 and offsets(rows, grids)


def _three_anchors(rows: Array) -> bool:
    """Returns whether there are three boxes for each cell of a square picture."""
    return rows.shape[1] % 3 == 0 and len(square(_STRIDES, rows.shape[1] // 3)) > 0


def _sure_pair(seen: Seen, boxes: int, scores: int) -> bool:
    values = seen.outputs[boxes]
    if values.shape[1] < _FEWEST or not _within(seen.outputs[scores]):
        return False
    if _ordered(values):
        return _surely_corners(values)
    return _named(seen, boxes, _BOXES) and bool((values > 0).all())


def _form(asked: BoxRequest, layout: Layout, rows: Array) -> str:
    if asked.form != "auto":
        return asked.form
    if layout.kind == "pair":
        return CORNERS if _ordered(rows) else CENTER
    return CORNERS if layout.kind == "final" else CENTER


def _grids(asked: BoxRequest, layout: Layout, rows: Array) -> tuple[tuple[int, int, int], ...]:
    """Returns the grids of cells from which the boxes are offsets; () if the boxes are not offsets."""
    boxes, strides = rows.shape[1], asked.cells or _STRIDES
    if asked.strides == "none" or layout.kind == "final":
        return ()
    grids = grids_of(strides, *asked.pixels) if asked.pixels else square(strides, boxes)
    if asked.strides == "auto":
        offered = layout.kind != "pair" and cells_in(grids) == boxes and layout.form == CENTER
        return grids if offered and offsets(rows, grids) else ()
    if cells_in(grids) != boxes:
        told = "/".join(map(str, strides))
        raise MisfitError(
            f"boxes(strides={told},size=HEIGHTxWIDTH) with a picture of {boxes} cells at these strides"
        )
    return grids


def _check_scores(layout: Layout, rows: Array) -> None:
    scores = rows[..., 4:5] if layout.kind == "final" else rows[..., 4:]
    if layout.scores == "as_they_are" and not _within(scores):
        told = f"they are {scores.min():.3g} to {scores.max():.3g}"
        raise MisfitError(f"scores within 0..1, or boxes(scores=sigmoid) or boxes(scores=softmax); {told}")


def _background(asked: BoxRequest, layout: Layout, rows: Array) -> int | None:
    """Returns the background class; None if there is none.

    Unless the user sets it, only a pair of outputs whose probabilities sum to 1 has one: the class with the largest
    mean, provided that this is the first or the last class.
    """
    if asked.background == "none" or layout.kind == "final":
        return None
    by_class = rows[..., 5 if layout.kind == "objectness" else 4 :]
    classes = int(by_class.shape[2])
    if asked.background != "auto":
        wanted = int(asked.background)
        if not -classes <= wanted < classes:
            raise MisfitError(f"a background from 0 to {classes - 1}")
        return int(wanted % classes)
    one = layout.scores == "softmax" or (np.abs(by_class.sum(2) - 1) < _SLACK).all()
    if layout.kind != "pair" or classes < 2 or not one:
        return None
    most = int(by_class.mean((0, 1)).argmax())
    return most if most in (0, classes - 1) else None
