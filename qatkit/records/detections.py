"""Detections after non-maximum suppression: the rule for the boxes that are kept, and the name of the file
with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DETECTIONS = "detections"  # the output [found, 7]: picture, corners, score, class
METADATA_KEY = "qatkit.nms"  # in the file, tells how it was made


@dataclass(frozen=True)
class Suppression:
    """The rule that decides which boxes are kept.

    Attributes:
        score: minimum score of a box.
        overlap: the overlap from which a better box of its class suppresses a box.
        boxes: maximum number per class and picture.
    """

    score: float
    overlap: float
    boxes: int


def nms_file(path: Path) -> Path:
    """Returns the path of the file with non-maximum suppression next to a detector's file: model.int8.nms.onnx."""
    return path.with_suffix(f".nms{path.suffix}")
