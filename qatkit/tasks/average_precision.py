"""Average precision of detectors, from the detections and the labelled boxes of all pictures.

    rows of a picture ── detections ──> boxes by score ── matched ──> a row of values ── precisions ──> AP by class

The protocol is COCO's. In the order of their scores, at most 100 detections per picture are each matched to
the labelled box of the same class with the largest overlap, at ten thresholds of overlap. The precision at a
recall is the best precision at this or any higher recall. The average is taken over 101 recalls. Detections
that match ignored boxes (difficult ones, crowds) count neither as right nor as wrong.

Source: Lin et al., "Microsoft COCO: Common Objects in Context", 2014, and the code of pycocotools.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit.tasks.decisions.matched_boxes import Boxes, overlap

Array = NDArray[Any]
OVERLAPS = np.arange(50, 100, 5) / 100  # thresholds of IoU from which a detection is right
DETECTIONS = 100  # maximum number of detections per picture
LEAST_SCORE = 0.01
MOST_OVERLAP = 0.6  # maximum overlap of two detections of one class
# Flags of a labelled box: it is ignored, or it is a group that any number of detections may match.
IGNORED, CROWD = 1, 2
# Columns of a detection's values; in the row of a class, the first is the number of its boxes.
CLASS, SCORE, RIGHT, LEFT_OUT, OVERLAP = range(5)
_BINS = 400  # bins of scores in a histogram
_CANDIDATES = 500  # maximum number of detections of a picture before suppression
_RECALLS = np.linspace(0, 1, 101)


def detections(
    rows: Array, least: float = LEAST_SCORE, most: float = MOST_OVERLAP, count: int = DETECTIONS
) -> Boxes:
    """Returns the boxes of a picture after non-maximum suppression within each class, best first.

    Args:
        rows: the corners and the score of each class, [boxes, 4 + classes].
        least: the score that a detection must exceed.
        most: maximum overlap (IoU) of two detections of one class.
        count: maximum number of detections.
    """
    scores = np.asarray(rows[:, 4:], np.float64)
    places = np.flatnonzero(scores > least)
    order = places[np.argsort(-scores.ravel()[places], kind="stable")][:_CANDIDATES]
    boxes, classes = np.divmod(order, scores.shape[1])
    corners = np.asarray(rows[boxes, :4], np.float64)
    near = (overlap(corners, corners) > most) & (classes[:, None] == classes)
    alive, kept = np.ones(len(order), np.bool_), list[int]()
    for place in range(len(order)):
        if alive[place]:
            kept.append(place)
            alive &= ~near[place]
    chosen = np.asarray(kept[:count], np.int64)
    return Boxes(corners[chosen], scores.ravel()[order[chosen]], classes[chosen])


def picture_values(found: Boxes, truth: Array, classes: int) -> Array:
    """Returns the contribution of a picture to the average precision, [DETECTIONS + classes, 5].

    A detection's row contains its class, its score, two bit masks and an overlap. The first mask has a bit for
    each threshold at which the detection is right, the second for each at which it counts neither as right nor
    as wrong. The overlap
    is the IoU with the box that is matched at the lowest threshold. Class -1 marks an unused row. A class's
    row begins with the number of its labelled boxes.

    Args:
        found: the detections, by descending score.
        truth: labelled boxes, [n, 6]: class, corners, and 0, `IGNORED` or `CROWD`; class -1 marks unused rows.
        classes: number of classes.
    """
    values = np.zeros((DETECTIONS + classes, 5))
    values[:DETECTIONS, CLASS] = -1
    truth = truth[truth[:, 0] >= 0]
    counted = truth[truth[:, 5] == 0, 0].astype(np.int64)
    values[DETECTIONS:, 0] = np.bincount(counted, minlength=classes)
    values[: found.count, CLASS], values[: found.count, SCORE] = found.classes, found.scores
    for label in np.unique(found.classes):
        places = np.flatnonzero(found.classes == label)
        values[places, RIGHT:] = _matched(found.corners[places], truth[truth[:, 0] == label])
    return values


def _matched(corners: Array, truth: Array) -> Array:
    """Returns the last three values of each detection of one class (`picture_values`), [detections, 3]."""
    found = np.zeros((len(corners), 3))
    truth = truth[np.argsort(truth[:, 5] > 0, kind="stable")]  # counted boxes first
    near, ignored, crowd = _overlaps(corners, truth), truth[:, 5] > 0, truth[:, 5] == CROWD
    for bit, least in enumerate(OVERLAPS):
        free = np.ones(len(truth), np.bool_)
        for place, row in enumerate(near):
            best = _best(row, free | crowd, ignored, least)
            if best is None:
                continue
            free[best] = False
            found[place, int(ignored[best])] += 1 << bit
            if bit == 0 and not ignored[best]:
                found[place, 2] = row[best]
    return found


def _best(row: Array, free: Array, ignored: Array, least: float) -> int | None:
    """Returns the index of the free box with the largest overlap; None if no overlap is at least `least`.

    An ignored box is returned only if no counted box overlaps enough.
    """
    for those in (free & ~ignored, free & ignored):
        near = np.where(those, row, -1.0)
        if len(near) and near.max() >= least:
            return int(near.argmax())
    return None


def _overlaps(corners: Array, truth: Array) -> Array:
    """Returns overlaps [detections, boxes]: the IoU; for a crowd, the share of the detection that lies in it."""
    near = overlap(corners, truth[:, 1:5])
    low = np.maximum(corners[:, None, :2], truth[None, :, 1:3])
    high = np.minimum(corners[:, None, 2:], truth[None, :, 3:5])
    areas = (corners[:, 2:] - corners[:, :2]).clip(min=0).prod(1)
    inside = (high - low).clip(min=0).prod(2) / np.maximum(areas, 1e-12)[:, None]
    return np.where(truth[:, 5] == CROWD, inside, near)


def precisions(values: Array) -> Array:
    """Returns the average precision of each class at each threshold, [classes, thresholds].

    It is NaN for a class without labelled boxes.

    Args:
        values: `picture_values` of all pictures, [N, DETECTIONS + classes, 5].
    """
    boxes = values[:, DETECTIONS:, 0].sum(0)
    rows = values[:, :DETECTIONS].reshape(-1, values.shape[2])
    rows = rows[rows[:, CLASS] >= 0]
    found = np.full((len(boxes), len(OVERLAPS)), np.nan)
    for label, count in enumerate(boxes):
        if count:
            own = rows[rows[:, CLASS] == label]
            found[label] = _average(own[np.argsort(-own[:, SCORE], kind="stable")], count)
    return found


def _average(rows: Array, count: float) -> Array:
    """Returns the average precision at each threshold, from the detections of a class, best first."""
    bits = 1 << np.arange(len(OVERLAPS))
    right, left_out = ((rows[:, column, None].astype(np.int64) & bits) > 0 for column in (RIGHT, LEFT_OUT))
    hits, misses = right.cumsum(0), (~right & ~left_out).cumsum(0)
    recalls, shares = hits / count, hits / np.maximum(hits + misses, 1)
    shares = np.maximum.accumulate(shares[::-1])[::-1]
    return np.array([_at_recalls(recalls[:, one], shares[:, one]) for one in range(len(OVERLAPS))])


def _at_recalls(recalls: Array, shares: Array) -> float:
    places = np.searchsorted(recalls, _RECALLS, side="left")
    reached = places < len(shares)
    return float(np.where(reached, np.append(shares, 0.0)[places.clip(max=len(shares))], 0.0).mean())


def mean_precision(found: Array) -> float:
    """Returns the mean average precision in percent, from `precisions`; 0 if no class has labelled boxes.

    The mean is over all thresholds and the classes with labelled boxes.
    """
    return 100 * float(np.nanmean(found)) if np.isfinite(found).any() else 0.0


def histograms(values: Array) -> Array:
    """Returns counts [classes, 1 + 2 thresholds, bins] that can be added over batches.

    Each class has the number of its labelled boxes in bin 0 of row 0. Then follow histograms of scores, from high
    to low: those of the right detections at each threshold, and those of the wrong ones.
    """
    boxes, thresholds = values[:, DETECTIONS:, 0].sum(0), len(OVERLAPS)
    found = np.zeros((len(boxes), 1 + 2 * thresholds, _BINS))
    found[:, 0, 0] = boxes
    rows = values[:, :DETECTIONS].reshape(-1, values.shape[2])
    rows = rows[rows[:, CLASS] >= 0]
    labels = rows[:, CLASS].astype(np.int64)
    bins = ((1 - rows[:, SCORE]) * _BINS).astype(np.int64).clip(0, _BINS - 1)
    for bit in range(thresholds):
        right, left_out = ((rows[:, one].astype(np.int64) >> bit) & 1 for one in (RIGHT, LEFT_OUT))
        np.add.at(found[:, 1 + bit], (labels, bins), right)
        np.add.at(found[:, 1 + thresholds + bit], (labels, bins), (1 - right) * (1 - left_out))
    return found


def mean_of_histograms(counts: Array) -> float:
    """Returns the mean average precision in percent from sums of `histograms`, exact up to the width of a bin."""
    thresholds, averages = len(OVERLAPS), list[float]()
    for of_class in counts:
        boxes = of_class[0, 0]
        for bit in range(thresholds if boxes else 0):
            hits, misses = (of_class[1 + bit + shift].cumsum() for shift in (0, thresholds))
            shares = hits / np.maximum(hits + misses, 1)
            shares = np.maximum.accumulate(shares[::-1])[::-1]
            averages.append(_at_recalls(hits / boxes, shares))
    return mean_precision(np.array(averages)) if averages else 0.0
