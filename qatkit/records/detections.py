"""Detections behind non-maximum suppression: which boxes are kept, and the file that keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DETECTIONS = "detections"  # the output [found, 7]: picture, corners, score, class
METADATA_KEY = "qatkit.nms"  # of the file, which says how it was made


@dataclass(frozen=True)
class Suppression:
    """Which boxes are kept.

    Attributes:
        score: of a box that counts.
        overlap: by which a better box of its class suppresses a box.
        boxes: of each class of a picture, at most.
    """

    score: float
    overlap: float
    boxes: int


def nms_file(path: Path) -> Path:
    """Returns the path of a file with non-maximum suppression beside a detector's file: model.int8.nms.onnx."""
    return path.with_suffix(f".nms{path.suffix}")
