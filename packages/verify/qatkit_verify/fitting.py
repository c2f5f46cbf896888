"""Fits pictures of any size to the height and width of a model's input.

    crop       scaled with fixed aspect ratio until it just covers `resize`; then the centre is cropped
    resize     scaled to the input's size; the aspect ratio may change
    letterbox  scaled with fixed aspect ratio until it just fits into the input; the rest has one fill value

All sizes and positions are integers, so that training, `qatkit_verify.preprocess` and preprocess.mjs agree in
every pixel. A size is written as one number for a square, or as [height, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FITS = ("crop", "resize", "letterbox")
# Position of the picture in a letterbox: ultralytics' YOLOs centre it; YOLOX, SCRFD and PaddleOCR start at
# the top left.
ALIGNMENTS = ("center", "top_left")
# Orders of channels, and of the axes of a batch.
ORDERS, LAYOUTS = ("rgb", "bgr"), ("nchw", "nhwc")
# The range of the pixels to which mean and std refer.
UNIT, LEVELS = "0..1", "0..255"
PIXELS = (UNIT, LEVELS)
PAD_VALUE = 114.0  # in 0..255, the YOLOs' fill value

Sides = tuple[int, int]


def sides(size: int | Sequence[int]) -> Sides:
    """Returns (height, width) of a size that is given as one number or as both."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def written(size: int | Sequence[int]) -> int | Sides:
    """Returns one number for a square, else (height, width), so that equal sizes compare equal."""
    height, width = sides(size)
    return height if height == width else (height, width)


def as_typed(size: int | Sequence[int]) -> int | list[int]:
    """Returns one number for a square, else [height, width], as in JSON and on the command line."""
    height, width = sides(size)
    return height if height == width else [height, width]


def by_sides(size: int | Sequence[int]) -> str:
    """Returns "HEIGHT x WIDTH"."""
    return " x ".join(map(str, sides(size)))


def are_sides(value: object, most: int) -> bool:
    """Returns whether `value` is an integer from 1 to `most`, or two of them."""
    each = value if isinstance(value, (list, tuple)) else (value, value)
    return len(each) == 2 and all(type(one) is int and 1 <= one <= most for one in each)


def covers(resize: int | Sequence[int], size: int | Sequence[int]) -> bool:
    """Returns whether `resize` is at least as high and as wide as `size`."""
    return all(large >= small for large, small in zip(sides(resize), sides(size), strict=True))


@dataclass(frozen=True)
class Fitting:
    """The scaling, cropping and padding of pictures of one size.

    Attributes:
        scaled: (height, width) to which the whole picture is scaled.
        start: (top, left) of the part of the scaled picture that is kept.
        kept: (height, width) of the kept part.
        place: (top, left) of the kept part in the model's input; the rest is filled.
    """

    scaled: Sides
    start: Sides
    kept: Sides
    place: Sides = (0, 0)


def fitting(fit: str, picture: Sides, size: Sides, resize: Sides, align: str) -> Fitting:
    """Returns how pictures are scaled, cropped and padded.

    Args:
        fit: one of `FITS`.
        picture: (height, width) of each picture.
        size: (height, width) of the model's input.
        resize: for fit "crop", the (height, width) that a picture is scaled to cover before the centre crop.
        align: one of `ALIGNMENTS`, for fit "letterbox".
    """
    if fit == "resize":
        return Fitting(size, (0, 0), size)
    if fit == "letterbox":
        scaled = fitted_size(*picture, size)
        room = (size[0] - scaled[0], size[1] - scaled[1])
        place = (room[0] // 2, room[1] // 2) if align == "center" else (0, 0)
        return Fitting(scaled, (0, 0), scaled, place)
    scaled = resized_size(*picture, resize)
    return Fitting(scaled, (crop_start(scaled[0], size[0]), crop_start(scaled[1], size[1])), size)


def resized_size(height: int, width: int, resize: int | Sequence[int]) -> Sides:
    """Returns the (height, width) to which an image is scaled so that it just covers `resize`, rounded down.

    A single number in `resize` is the length of the shorter side.
    """
    high, wide = sides(resize)
    if high * width >= wide * height:
        return high, int(high * width / height)
    return int(wide * height / width), wide


def fitted_size(height: int, width: int, size: Sides) -> Sides:
    """Returns the (height, width) to which an image is scaled so that it just fits into `size`, rounded."""
    high, wide = size
    if high * width <= wide * height:
        return high, max(1, (2 * high * width + height) // (2 * height))
    return max(1, (2 * wide * height + width) // (2 * width)), wide


def crop_start(size: int, crop: int) -> int:
    """Returns the start of the centre crop of an axis; halves are rounded to even, as in Python."""
    return round((size - crop) / 2)


def is_whole(height: int, width: int, size: Sides) -> bool:
    """Returns whether an image is resized in 8 bits: both sides shrink or stay, and neither becomes one pixel.

    ATen's 8-bit resize to one pixel is wrong.
    """
    return height >= size[0] and width >= size[1] and min(size) > 1
