"""The speed of a training run: images per second of each pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Pass:
    """A pass over the images of an epoch.

    Attributes:
        images: number of images that all ranks together trained on.
        waited, spent: seconds spent waiting for images, and seconds in total.
    """

    images: int = 0
    waited: float = 0.0
    spent: float = 0.0


def pace_of(passes: Sequence[Pass], cache: str = "") -> str:
    """Returns the speed in words; "" if there was no training.

    Args:
        passes: the passes in order.
        cache: a note on decoded images in memory; "" without a cache. With a cache, the first pass, which
            fills it, is reported separately.
    """
    done = [one for one in passes if one.images]
    if not done:
        return ""
    if not cache:
        return _told(done)
    later = f", then {_told(done[1:])}" if len(done) > 1 else ""
    return f"{_told(done[:1])}{later}; {cache}"


def _told(passes: Sequence[Pass]) -> str:
    images, waited, spent = (sum(getattr(p, name) for p in passes) for name in ("images", "waited", "spent"))
    return f"{images / spent:,.0f} samples/s, {100 * waited / spent:.0f} % of the time waiting for data"
