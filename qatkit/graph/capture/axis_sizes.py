"""Sizes of free axes with which a model runs, to find the axes and to compare its graph (`capture.free_axes`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple[int, int]  # an input and its axis
_STRIDES = {4: 128, 5: 32}  # by rank: the largest stride in pyramids for images, and for clips or volumes


@dataclass(frozen=True)
class FreeAxis:
    """An axis of one or more inputs for which a graph accepts any multiple of `step`.

    Attributes:
        name: the name of its size in the ONNX file.
        places: the axes (input, axis) that always have this size together.
        size: the size in the example.
        others: other sizes that the model was run with: a distant one, then a near one if there is any.
        step: the number that the size must be a multiple of.
        asked: whether the configuration names this axis.
    """

    name: str
    places: tuple[Place, ...]
    size: int
    others: tuple[int, ...]
    step: int
    asked: bool = False


def distant_sizes(size: int, number: int, rank: int) -> list[int]:
    """Returns sizes to try: distant ones first, then nearer and smaller ones.

    A distant size differs from `size` after all strides of a pyramid, too, but a table of positions may be too
    short. Distances vary with the axis (`number`) and are smaller for clips and volumes, to save time.
    """
    each = 8 if rank > 4 else 32
    unit = each * (number + 1)
    half = unit * max(1, size // 64)
    far = max(_STRIDES.get(rank, 0) + each * number, half)
    steps = [far, half, unit, -unit * max(1, size // 128), 2 * (number + 1), -(number + 1)]
    return [size + step for step in dict.fromkeys(steps) if size + step > 0]


def sizes_between(axes: Sequence[FreeAxis], number: int) -> dict[FreeAxis, int]:
    """Returns sizes for the comparison: no run had them, and no two are equal; `number` counts attempts."""
    found: dict[FreeAxis, int] = {}
    for i, axis in enumerate(axes, number):
        size, step, far = axis.size, axis.step, max(axis.others[0], axis.size)
        known = {size, *axis.others, *found.values()}
        near = (
            one
            for least in (step * (3 + 2 * i), step)
            for one in (*range(size + least, far, step), *range(size - least, 0, -step))
        )
        sizes = itertools.chain(near, itertools.count(far + step, step))
        found[axis] = next(one for one in sizes if one not in known)
    return found
