"""Tests of fitting pictures to a model's input size, against formulas of ultralytics and torchvision."""

from __future__ import annotations

import numpy as np
import pytest
from torchvision.transforms import v2

from qatkit_verify.fitting import (
    as_typed,
    by_sides,
    covers,
    fitted_size,
    fitting,
    resized_size,
    sides,
    written,
)


def _pairs(count: int, seed: int) -> list[tuple[int, int, int, int]]:
    draw = np.random.default_rng(seed)
    return [tuple(int(one) for one in row) for row in draw.integers(1, 700, (count, 4))]  # type: ignore[misc]


def test_a_letterbox_has_the_size_that_ultralytics_computes() -> None:
    """Follows r = min(H/h, W/w), then round(h * r) and round(w * r); halves may round either way."""
    for height, width, high, wide in _pairs(500, 0):
        ratio = min(high / height, wide / width)
        exact = height * ratio, width * ratio
        found = fitted_size(height, width, (high, wide))
        assert found[0] <= high and found[1] <= wide and (found[0] == high or found[1] == wide)
        for one, wanted in zip(found, exact, strict=True):
            assert one == max(1, round(wanted)) or abs(abs(one - wanted) - 0.5) < 1e-9


def test_a_letterbox_is_centred_as_ultralytics_centres_it() -> None:
    """Follows round(room / 2 - 0.1), or the top left corner as in YOLOX."""
    for height, width, high, wide in _pairs(200, 1):
        centred, first = (
            fitting("letterbox", (height, width), (high, wide), (1, 1), at) for at in ("center", "top_left")
        )
        room = high - centred.scaled[0], wide - centred.scaled[1]
        assert centred.place == tuple(round(one / 2 - 0.1) for one in room)
        assert first.place == (0, 0) and first.scaled == first.kept == centred.kept == centred.scaled


def test_a_square_crop_is_resized_as_torchvision_does_it() -> None:
    for height, width, resize, _ in _pairs(300, 2):
        assert list(
            resized_size(height, width, resize)
        ) == v2.functional._geometry._compute_resized_output_size((height, width), [resize])


def test_what_is_cropped_is_just_covered() -> None:
    for height, width, high, wide in _pairs(300, 3):
        found = resized_size(height, width, (high, wide))
        assert found[0] >= high and found[1] >= wide and (found[0] == high or found[1] == wide)
        longer = max(range(2), key=lambda axis: found[axis] - (high, wide)[axis])
        scale = found[1 - longer] / (height, width)[1 - longer]
        assert abs(found[longer] - (height, width)[longer] * scale) < 1
        how = fitting("crop", (height, width), (high, wide), (high, wide), "center")
        assert how.kept == (high, wide) and how.place == (0, 0)
        assert all(
            0 <= start <= side - kept for start, side, kept in zip(how.start, found, how.kept, strict=True)
        )


@pytest.mark.parametrize("size", [8, [8, 8], (8, 8)])
def test_a_square_is_one_number_however_it_is_written(size: int | list[int] | tuple[int, int]) -> None:
    assert (written(size), as_typed(size), sides(size), by_sides(size)) == (8, 8, (8, 8), "8 x 8")


def test_two_sides_are_height_and_width() -> None:
    assert (written([8, 9]), as_typed((8, 9)), sides([8, 9]), by_sides((8, 9))) == (
        (8, 9),
        [8, 9],
        (8, 9),
        "8 x 9",
    )
    assert (
        covers([9, 9], (9, 8)) and covers(9, (9, 8)) and not covers(8, (9, 8)) and not covers([9, 7], [9, 8])
    )
