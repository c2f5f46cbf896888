"""The decision on detected boxes: two models agree if they find the same boxes after non-maximum suppression.

The figure is F1 over all samples: twice the number of matches, divided by the number of boxes of both models.
A sample without boxes does not count. On a single sample, the models agree if all boxes of both are matched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qatkit.config.fields import FRACTION, Choices, Limit, Range, setting
from qatkit.tasks.base import Agreement
from qatkit.tasks.decisions.base import Decision, Request, Seen

if TYPE_CHECKING:
    from qatkit.tasks.decisions.base import Array
    from qatkit.tasks.decisions.box_layouts import Layout
    from qatkit.tasks.decisions.matched_boxes import Boxes


@dataclass(frozen=True)
class Pattern(Limit):
    """A limit that requires a text to match a pattern.

    Args:
        form: a regular expression.
        words: a description of the form for messages.
    """

    form: str
    words: str

    def holds(self, value: Any) -> bool:
        """Returns whether the form matches all of `value`."""
        return re.fullmatch(self.form, value) is not None

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class BoxRequest(Request):
    """A request that models find the same boxes, with the same classes."""

    name: ClassVar[str] = "boxes"
    call: ClassVar[str] = "boxes(SCORE)"
    score: float = setting(0.3, "score above which a box counts", FRACTION)
    iou: float = setting(0.5, "overlap from which two boxes are the same", Range(0, 1, above=True))
    nms: float = setting(0.45, "overlap above which the worse of two boxes of a class is dropped", FRACTION)
    layout: str = setting(
        "auto",
        "layout of the boxes in the outputs",
        Choices(("auto", "objectness", "classes", "pair", "final")),
    )
    form: str = setting(
        "auto",
        "center: x, y, width, height; corners: x1, y1, x2, y2",
        Choices(("auto", "center", "corners")),
    )
    strides: str = setting(
        "auto",
        "strides of the cells from which the boxes are offsets; none: they are not offsets",
        Pattern(r"auto|none|[1-9]\d*(/[1-9]\d*)*", "auto, none or strides, such as 8/16/32"),
    )
    size: str = setting(
        "auto",
        "size of the picture, needed for strides",
        Pattern(r"auto|[1-9]\d*(x[1-9]\d*)?", "auto, SIDE or HEIGHTxWIDTH in pixels"),
    )
    scores: str = setting(
        "as_they_are", "conversion to probabilities", Choices(("as_they_are", "sigmoid", "softmax"))
    )
    background: str = setting(
        "auto",
        "class of the background",
        Pattern(r"auto|none|-?\d+", "auto, none or the number of a class"),
    )

    @property
    def title(self) -> str:
        return f"boxes (F1 at IoU {self.iou:g})"

    @property
    def cells(self) -> tuple[int, ...]:
        """The strides that the user set; () if none are set."""
        return () if self.strides in ("auto", "none") else tuple(map(int, self.strides.split("/")))

    @property
    def pixels(self) -> tuple[int, int] | None:
        """The height and width that the user set; None if none are set."""
        if self.size == "auto":
            return None
        height, _, width = self.size.partition("x")
        return int(height), int(width or height)

    @classmethod
    def takes(cls, seen: Seen) -> bool:
        from qatkit.tasks.decisions.find_boxes import possible

        return possible(seen)

    def fitted(self, seen: Seen) -> Decision:
        from qatkit.tasks.decisions.find_boxes import found

        return MatchedBoxes(self, found(self, seen))


@dataclass(frozen=True)
class MatchedBoxes(Decision):
    """The decision whether models find the same boxes, for outputs with a known layout.

    Attributes:
        asked: the request with the limits on scores and overlaps.
        layout: the layout of the boxes in the outputs.
    """

    asked: BoxRequest
    layout: Layout

    @property
    def title(self) -> str:
        return self.asked.title

    def joined(self, outputs: Sequence[Array]) -> Array:
        """Returns rows of boxes and scores, [N, boxes, values]."""
        return self.layout.rows(outputs)

    def boxes(self, rows: Array) -> list[Boxes]:
        """Returns the boxes of each sample."""
        return [self.layout.boxes(one, self.asked.score, self.asked.nms) for one in rows]

    def agree(self, exact: Array, found: Array) -> Array:
        import numpy as np

        return np.array([2 * same == boxes for same, boxes in self.counts(exact, found)], np.bool_)

    def counts(self, exact: Array, found: Array) -> list[tuple[int, int]]:
        """Returns the number of matched pairs, and the number of boxes of both models, for each sample."""
        from qatkit.tasks.decisions.matched_boxes import matches

        pairs = zip(self.boxes(exact), self.boxes(found), strict=True)
        return [(matches(one, other, self.asked.iou), one.count + other.count) for one, other in pairs]

    def agreement(self) -> Agreement:
        return _F1(self)


class _F1(Agreement):
    """The F1 score of matched boxes.

    Args:
        boxes: the decision that reads boxes from the outputs.
    """

    def __init__(self, boxes: MatchedBoxes) -> None:
        self._boxes = boxes
        self._matched = self._all = 0

    def add(self, exact: Array, found: Array) -> None:
        for matched, both in self._boxes.counts(exact, found):
            self._matched, self._all = self._matched + matched, self._all + both

    @property
    def share(self) -> float:
        return 2 * self._matched / self._all if self._all else 1.0

    @property
    def remark(self) -> str:
        return f"{2 * self._matched} of {self._all} boxes of both files match"

    @property
    def doubt(self) -> str:
        return "" if self._all else f"no box has a score above {self._boxes.asked.score:g} in either file"
