"""Turns raw pixels into the model's input with NumPy, bit-identical to training.

    uint8 [H, W, C] ── grey or colour ── resized ── cropped or filled ── RGB or BGR ── (x / 255 - mean) / std ── axes

Training does the same with torch (`qatkit.data.preprocessing`), and takes the weights from this module and
the sizes from `fitting`. So that the two agree in every bit on every CPU, nothing here depends on the order
of sums or on fused multiply-adds:

- an image that shrinks is resized in 8 bits as in Pillow and ATen: weights are multiples of 2^-p that fit
  16 bits, and sums of integers are rounded to a byte after the rows and again after the columns;
- an image with a growing side is resized in float32, rows first: each product and each sum is rounded by
  itself, and the taps are added from left to right;
- weights come from float64, one operation at a time.

Weights are those of an antialiased resize: the filter is stretched by in/out where an axis shrinks, its taps
are cut off at the border, and the remaining ones are normalised to a sum of 1 (Pillow's `Resample.c`, ATen's
`UpSampleKernel.cpp`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import (
    ALIGNMENTS,
    FITS,
    LAYOUTS,
    LEVELS,
    ORDERS,
    PAD_VALUE,
    PIXELS,
    UNIT,
    Fitting,
    are_sides,
    as_typed,
    covers,
    fitting,
    is_whole,
    sides,
)
from qatkit_verify.integer_ends import IntegerIO

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
# Weights of red, green and blue in grey, in parts of GREY_UNIT: ITU-R BT.601, with torchvision's digits.
GREY, GREY_UNIT = (2989, 5870, 1140), 10_000

_MOST_BITS = 22  # maximum p for weights that are multiples of 2^-p
_MOST_SIDE = 2**16

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
_Axis = Callable[[NDArray[Any], "Taps", int, int], NDArray[Any]]


@dataclass(frozen=True)
class Taps:
    """The indices [out, K] that each value of a resized axis reads, and their weights (0: not used)."""

    index: NDArray[np.int64]
    weight: NDArray[np.float64]

    def cut(self, start: int, length: int) -> Taps:
        """Returns the taps of `length` values of the resized axis, from `start` on."""
        return Taps(self.index[start : start + length], self.weight[start : start + length])

    @property
    def float32(self) -> Floats:
        """The weights [out, K] for a resize in float32."""
        return self.weight.astype(np.float32)

    def in_steps(self) -> tuple[NDArray[np.int32], int]:
        """Returns the weights [out, K] in steps of 2^-p that fit 16 bits, and p.

        It must be called before `cut`, since p depends on the largest weight of the whole axis.
        """
        most = float(self.weight.max())
        bits = next((p for p in range(_MOST_BITS) if int(0.5 + most * 2 ** (p + 1)) >= 2**15), _MOST_BITS)
        scaled = self.weight * 2.0**bits
        return np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32), bits


def _triangle(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(1.0 - x, 0.0)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns Keys' cubic convolution kernel with a = -1/2."""
    a = -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


# Filters as functions of the distance in pixels, and the distance beyond which they are 0.
_FILTERS: dict[str, tuple[Callable[[NDArray[np.float64]], NDArray[np.float64]], float]] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
}


@functools.lru_cache(64)
def taps(size: int, wanted: int, interpolation: str) -> Taps:
    """Returns the taps to resize an axis of `size` values to `wanted` values, by one of `INTERPOLATIONS`."""
    if interpolation == "nearest":
        source = np.floor(np.arange(wanted, dtype=np.float32) * np.float32(size / wanted))
        return Taps(np.minimum(source.astype(np.int64), size - 1)[:, None], np.ones((wanted, 1)))
    filter_of, reach = _FILTERS[interpolation]
    scale = size / wanted
    stretch = max(scale, 1.0)
    centre = (np.arange(wanted) + 0.5) * scale
    first = np.maximum(np.trunc(centre - reach * stretch + 0.5), 0).astype(np.int64)
    end = np.minimum(np.trunc(centre + reach * stretch + 0.5), size).astype(np.int64)
    index = first[:, None] + np.arange((end - first).max())
    weight = filter_of(np.abs((index - centre[:, None] + 0.5) * (1.0 / stretch)))
    weight[index >= end[:, None]] = 0.0
    weight /= np.add.accumulate(weight, axis=1)[:, -1:]  # from left to right; np.sum has its own order
    return Taps(np.minimum(index, size - 1), weight)


def unit_scale(values: Sequence[float], pixels: str) -> tuple[float, ...]:
    """Returns `values`, a mean or std for pixels in the range `pixels`, converted to the range 0..1."""
    return tuple(value / 255 for value in values) if pixels == LEVELS else tuple(values)


@dataclass(frozen=True)
class Preprocess:
    """The preprocessing of an image, as preprocess.json describes it.

    Args:
        image_size: height and width of the model's input, in pixels: one number, or both.
        resize: for fit "crop", the size that an image covers before the centre crop: its shorter side, or
            both sides.
        mean, std: the normalisation per channel (1 or 3) of the input, for pixels in the range `pixels`.
        interpolation: one of `INTERPOLATIONS`.
        dtype: the type of the input, "float32" or "uint8" (raw pixels; the file normalises).
        upright: whether a picture file is rotated as its EXIF data say when it is opened.
        fit: one of `FITS`.
        pad_value, align: for fit "letterbox": the fill value in 0..255, and one of `ALIGNMENTS`.
        order: the order of the channels, one of `ORDERS`.
        layout: the order of the axes of the input, one of `LAYOUTS`.
        pixels: the range of pixels to which mean and std refer, one of `PIXELS`.
    """

    image_size: int | tuple[int, int]
    resize: int | tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    dtype: str = "float32"
    upright: bool = False
    fit: str = "crop"
    pad_value: float = PAD_VALUE
    align: str = "center"
    order: str = "rgb"
    layout: str = "nchw"
    pixels: str = UNIT

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """Reads the contents of preprocess.json; older files lack the keys of later features.

        Raises:
            ConfigError: a value is missing or unknown to this version, or two values contradict each other.
        """
        for key, (allowed, is_allowed) in _ALLOWED.items():
            found = values.get(key)
            if not is_allowed(found) and not (key in _LATER and key not in values):
                raise ConfigError(f"preprocess.json: {key}", found, allowed)
        mean, std = tuple(values["mean"]), tuple(values["std"])
        if not len(mean) == len(std) == values["channels"]:
            raise ConfigError(
                "preprocess.json: mean", list(mean), "one number per channel, with as many numbers as std"
            )
        if not covers(values["resize"], values["image_size"]):
            allowed = f"at least image_size ({as_typed(values['image_size'])})"
            raise ConfigError("preprocess.json: resize", values["resize"], allowed)
        dtype, layout = values["input"]["dtype"], values.get("layout", "NCHW").lower()
        if (dtype, layout) == ("uint8", "nhwc"):
            raise ConfigError("preprocess.json: layout", "NHWC", "NCHW with an input of uint8")
        sizes = (sides(values["image_size"]), sides(values["resize"]))
        return cls(*sizes, mean, std, values["interpolation"], dtype, bool(values.get("upright")),
                   fit=values.get("fit", "crop"), pad_value=float(values.get("pad_value", PAD_VALUE)),
                   align=values.get("align", "center"), layout=layout, pixels=values.get("pixels", UNIT),
                   order="bgr" if values.get("channel_order") == "BGR" else "rgb")  # fmt: skip

    @property
    def channels(self) -> int:
        """The number of channels of the input."""
        return len(self.mean)

    def batch(self, images: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Returns the model's input, [N, C, H, W] or [N, H, W, C], for N images, which may differ in size.

        Each image is as in `__call__`.
        """
        return np.concatenate([self(image) for image in images])

    def __call__(self, image: NDArray[Any]) -> NDArray[Any]:
        """Returns the input for one image.

        Args:
            image: uint8 [H, W, C] with 1 or 3 channels, or [H, W].

        Returns:
            [1, channels, height, width] or [1, height, width, channels], of type `dtype`.

        Raises:
            ConfigError: the array is not such an image.
        """
        fitted = self._fitted(_of_channels(image, self.channels))
        normalised = self._normalised(fitted[..., ::-1] if self.order == "bgr" else fitted)
        if self.dtype == "uint8":  # undo the normalisation exactly as verification does
            mean, std = (unit_scale(one, self.pixels) for one in (self.mean, self.std))
            return IntegerIO(mean, std, "uint8", 1.0, 0).pixels(normalised)
        return np.ascontiguousarray(normalised.transpose(0, 2, 3, 1)) if self.layout == "nhwc" else normalised

    def _fitted(self, image: Pixels) -> Floats:
        """Fits an image of any size to the input: [height, width, C] in 0..255."""
        size = sides(self.image_size)
        picture = (image.shape[0], image.shape[1])
        how = fitting(self.fit, picture, size, sides(self.resize), self.align)
        kept = _resized(image, how, self.interpolation)
        if how.kept == size:
            return kept
        found = np.full((*size, kept.shape[2]), self.pad_value, np.float32)
        (top, left), (height, width) = how.place, how.kept
        found[top : top + height, left : left + width] = kept
        return found

    def _normalised(self, pixels: Floats) -> Floats:
        """Normalises pixels [H, W, C] to float32 [1, C, H, W]; each operation is rounded by itself."""
        mean, std = (np.asarray(value, np.float32).reshape(-1, 1, 1) for value in (self.mean, self.std))
        found = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
        if self.pixels == UNIT:
            found /= np.float32(255)
        found -= mean
        found /= std
        return found


def _is_numbers(value: object, least: float = -np.inf) -> bool:
    return isinstance(value, list) and all(type(v) in (int, float) and least < v < np.inf for v in value)


def _is_side(value: object) -> bool:
    return are_sides(value, _MOST_SIDE)


def _one_of(*allowed: str) -> tuple[str, Callable[[Any], bool]]:
    return " | ".join(allowed), lambda value: isinstance(value, str) and value in allowed


_SIDE = f"an integer from 1 to {_MOST_SIDE}, or [height, width]"
# For each key of preprocess.json: the allowed values in words, and their test.
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "image_size": (_SIDE, _is_side),
    "resize": (_SIDE, _is_side),
    "interpolation": _one_of(*INTERPOLATIONS),
    "channels": ("1 | 3", lambda value: type(value) is int and value in (1, 3)),
    "mean": ("one number per channel", _is_numbers),
    "std": ("one positive number per channel", lambda value: _is_numbers(value, 0.0)),
    "crop": _one_of("center", "none"),
    "fit": _one_of(*FITS),
    "pad_value": ("a number from 0 to 255", lambda value: type(value) in (int, float) and 0 <= value <= 255),
    "align": _one_of(*ALIGNMENTS),
    "channel_order": _one_of("L", *(order.upper() for order in ORDERS)),
    "layout": _one_of(*(layout.upper() for layout in LAYOUTS)),
    "pixels": _one_of(*PIXELS),
    "upright": ("true | false", lambda value: isinstance(value, bool)),
    "input": (
        "an input of dtype float32 | uint8",
        lambda value: isinstance(value, dict) and value.get("dtype") in ("float32", "uint8"),
    ),
}
# Keys that bundles of older versions lack.
_LATER = frozenset({"upright", "fit", "pad_value", "align", "channel_order", "layout", "pixels"})


def _of_channels(image: NDArray[Any], channels: int) -> Pixels:
    """Returns uint8 [H, W, channels]: grey is repeated, and colour is converted to grey where needed."""
    pixels = image[..., None] if image.ndim == 2 else image
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or 0 in pixels.shape:
        raise ConfigError(
            "image", f"{image.dtype} {list(image.shape)}", "uint8 [H, W], [H, W, 1] or [H, W, 3]"
        )
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    red, green, blue = (pixels[..., i].astype(np.uint32) * GREY[i] for i in range(3))
    return ((red + green + blue) // GREY_UNIT).astype(np.uint8)[..., None]


def _resized(image: Pixels, how: Fitting, interpolation: str) -> Floats:
    """Resizes an image to `how.scaled` and returns the part to keep, float32 [H, W, C] in 0..255."""
    height, width = image.shape[:2]
    (top, left), (rows, columns) = how.start, how.kept
    if how.scaled == (height, width):
        return image[top : top + rows, left : left + columns].astype(np.float32)
    resize_axis: _Axis = _bytes_axis if is_whole(height, width, how.scaled) else _float_axis
    across, down = (
        taps(*ends, interpolation) for ends in zip((width, height), how.scaled[::-1], strict=True)
    )
    found = resize_axis(image.swapaxes(0, 1), across, left, columns).swapaxes(0, 1)
    return resize_axis(found, down, top, rows).astype(np.float32)


def _bytes_axis(image: NDArray[Any], axis: Taps, start: int, length: int) -> Pixels:
    """Resizes the first axis of [size, ...] in 8 bits, for `length` values from `start` on."""
    if axis.index.shape[1] == 1:  # nearest: nothing to compute
        return image[axis.index[start : start + length, 0]]
    steps, bits = axis.in_steps()
    flat, found = _rows(image), np.full((length, image[0].size), 1 << bits >> 1, np.int32)
    for index, step in zip(axis.cut(start, length).index.T, steps[start : start + length].T, strict=True):
        found += flat[index] * step[:, None]
    found >>= bits
    return np.clip(found, 0, 255).astype(np.uint8).reshape(length, *image.shape[1:])


def _float_axis(image: NDArray[Any], axis: Taps, start: int, length: int) -> Floats:
    """Resizes the first axis of [size, ...] in float32, for `length` values from `start` on."""
    part, flat = axis.cut(start, length), _rows(image).astype(np.float32)
    weights = part.float32
    found = flat[part.index[:, 0]] * weights[:, :1]
    for tap in range(1, weights.shape[1]):
        found += flat[part.index[:, tap]] * weights[:, tap : tap + 1]
    return found.reshape(length, *image.shape[1:])


def _rows(image: NDArray[Any]) -> NDArray[Any]:
    """Reshapes [size, ...] to [size, rest], so that a tap reads whole rows of memory."""
    return np.ascontiguousarray(image).reshape(len(image), -1)
