"""The decision on masks of segmentation and saliency: values above a threshold, or classes of pixels.

[N, 1, H, W], [N, H, W], [N, H, W, 1]   pixels above a threshold; the figure is their intersection over union
[N, C, H, W] (axis=-1: [N, H, W, C])    the class of each pixel; the figure is the share of equal pixels
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.config.fields import FRACTION, setting
from qatkit.tasks.base import Agreement
from qatkit.tasks.decisions.base import Decision, MisfitError, Request, Seen

if TYPE_CHECKING:
    from qatkit.tasks.decisions.base import Array

_END = 0.05  # largest distance of a decided pixel from 0 or 1, and largest share of pixels in between
_SOME = 0.01  # minimum share of pixels at either end
_ONE = 1e-3  # tolerance of the sum of probabilities at a pixel


@dataclass(frozen=True)
class Mask(Request):
    """A request that models return similar masks."""

    name: ClassVar[str] = "mask"
    call: ClassVar[str] = "mask(THRESHOLD)"
    threshold: float = setting(0.5, "value above which a pixel belongs to a mask of one channel")
    axis: int = setting(1, "axis of the classes if there are several channels: 1 or -1")
    same: float = setting(
        0.9, "IoU or share of equal pixels from which two masks count as the same", FRACTION
    )

    @property
    def title(self) -> str:
        return "masks"

    @classmethod
    def takes(cls, seen: Seen) -> bool:
        shape = seen.first.shape
        wide = sum(size > 1 for size in shape[1:]) > 1
        return len(shape) in (3, 4) and wide and shape[0] == seen.samples

    def fitted(self, seen: Seen) -> Decision:
        if not self.takes(seen):
            raise MisfitError(
                "a first output [N, H, W], [N, 1, H, W], [N, classes, H, W] or, for axis=-1, [N, H, W, classes]"
            )
        shape = seen.first.shape
        if len(shape) == 3 or 1 in (shape[1], shape[3]):
            return _OneChannel(self.same, self.threshold)
        if self.axis not in (1, -1):
            raise MisfitError("mask(axis=1) or mask(axis=-1), where axis is that of the classes")
        return _Classes(self.same, self.axis)


@dataclass(frozen=True)
class _Masks(Decision):
    """A decision on masks: the figure is the mean `likeness`; a sample agrees if its likeness is at least `same`."""

    decides: ClassVar[bool] = True
    same: float

    def agree(self, exact: Array, found: Array) -> Array:
        import numpy as np

        return np.asarray(self.likeness(exact, found) >= self.same)

    @abstractmethod
    def likeness(self, exact: Array, found: Array) -> Array:
        """Returns the similarity of the masks of each sample, 0..1, [N]."""

    def agreement(self) -> Agreement:
        return _MeanLikeness(self)


@dataclass(frozen=True)
class _OneChannel(_Masks):
    """A decision on the pixels above a threshold."""

    threshold: float

    @property
    def title(self) -> str:
        return f"masks above {self.threshold:g} (mean IoU)"

    def decide(self, output: Array) -> Array:
        above: Array = output > self.threshold
        return above

    def likeness(self, exact: Array, found: Array) -> Array:
        """Returns the IoU of each sample; 1 for two empty masks."""
        import numpy as np

        first, second = (self.decide(one).reshape(len(one), -1) for one in (exact, found))
        both, either = (first & second).sum(1), (first | second).sum(1)
        return np.where(either > 0, both / np.maximum(either, 1), 1.0)


@dataclass(frozen=True)
class _Classes(_Masks):
    """A decision on the class with the largest value at each pixel."""

    axis: int

    @property
    def title(self) -> str:
        return "classes of pixels"

    def decide(self, output: Array) -> Array:
        best: Array = output.argmax(self.axis)
        return best

    def likeness(self, exact: Array, found: Array) -> Array:
        """Returns the share of equal pixels of each sample."""
        same: Array = (self.decide(exact) == self.decide(found)).reshape(len(exact), -1).mean(1)
        return same


class _MeanLikeness(Agreement):
    """The mean of `_Masks.likeness`.

    Args:
        masks: the decision that reads masks from the outputs.
    """

    def __init__(self, masks: _Masks) -> None:
        self._masks = masks
        self._samples, self._total, self._values = 0, 0.0, set[int]()

    def add(self, exact: Array, found: Array) -> None:
        import numpy as np

        self._samples += len(exact)
        self._total += float(self._masks.likeness(exact, found).sum())
        for one in (exact, found):
            self._values |= set(np.unique(self._masks.decide(one)).tolist())

    @property
    def share(self) -> float:
        return self._total / self._samples

    @property
    def doubt(self) -> str:
        if len(self._values) > 1:
            return ""
        return "all pixels of all samples have the same value in both files"


def class_maps(outputs: Sequence[Array]) -> bool:
    """Returns whether the first output is clearly a class map: probabilities [N, C > 1, H, W]."""
    import numpy as np

    first = outputs[0]
    if first.ndim != 4 or first.shape[1] < 2 or min(first.shape[2:]) < 2:
        return False
    return bool(first.min() >= 0 and (np.abs(first.sum(1) - 1) < _ONE).all())


def one_mask(outputs: Sequence[Array]) -> bool:
    """Returns whether the first output is clearly a mask [N, 1, H, W].

    This requires values within 0..1: nearly all of them near 0 or 1, and some near each.
    """
    first = outputs[0]
    if first.ndim != 4 or first.shape[1] != 1 or min(first.shape[2:]) < 2:
        return False
    if first.min() < 0 or first.max() > 1:
        return False
    low, high = (first < _END).mean(), (first > 1 - _END).mean()
    return bool(min(low, high) > _SOME and low + high > 1 - _END)
