"""How fast a training saw its images, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Pass:
    """Over the images of an epoch.

    Attributes:
        images: of all ranks that were trained on.
        waited, spent: seconds in which training waited for them, and in all.
    """

    images: int = 0
    waited: float = 0.0
    spent: float = 0.0


def pace_of(passes: Sequence[Pass], cache: str = "") -> str:
    """In words; "" where nothing was trained on.

    Args:
        passes: in their order.
        cache: what there is to say of decoded images that were kept: then the first pass stands apart.
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
    return f"{images / spent:,.0f} images/s, {100 * waited / spent:.0f} % of the time waiting for data"
