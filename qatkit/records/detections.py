"""Detections after non-maximum suppression: the rule for the boxes that are kept, and the name of the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DETECTIONS = "detections"  # name of the output [found, 7]: picture, four corners, score, class
METADATA_KEY = "qatkit.nms"  # metadata key in the file that describes its suppression


@dataclass(frozen=True)
class Suppression:
    """The rule that decides which boxes are kept.

    Attributes:
        score: the minimum score of a box.
        overlap: the overlap with a better box of its class above which a box is suppressed.
        boxes: the maximum number of boxes per class and picture.
    """

    score: float
    overlap: float
    boxes: int


def nms_file(path: Path) -> Path:
    """Returns the path of the file with non-maximum suppression next to a detector's file: model.int8.nms.onnx."""
    return path.with_suffix(f".nms{path.suffix}")
