"""From raw pixels to the model's input in NumPy, the training's bit for bit.

    uint8 [H, W, C] ── grey or colour ── shorter side to `resize` ── centre crop ── (x / 255 - mean) / std

Training does the same with torch (`qatkit.data.preprocessing`), and asks this module for sizes, crops and weights. So
that the two agree in every bit on every CPU, nothing here depends on the order of sums or on fused multiply-adds:

- an image that shrinks is resized in 8 bits as Pillow and ATen do it: weights in whole steps of 2^-p that fit 16 bits,
  sums of integers, rounded to a byte after the rows and again after the columns;
- one that grows is resized in float32, rows first: each product and each sum is rounded by itself, the taps from left
  to right;
- weights come from float64, one operation at a time.

Weights are those of an antialiased resize: the filter is stretched by in/out where an axis shrinks, its taps are cut
off at the border, and what is left is brought to a sum of 1 (Pillow's `Resample.c`, ATen's `UpSampleKernel.cpp`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError
from qatkit_verify.integer_ends import IntegerIO

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
# Red, green and blue in grey, in parts of GREY_UNIT: ITU-R BT.601, with the digits that torchvision has.
GREY, GREY_UNIT = (2989, 5870, 1140), 10_000

_MOST_BITS = 22  # of a weight's steps
_MOST_SIDE = 2**16

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
_Axis = Callable[[NDArray[Any], "Taps", int, int], NDArray[Any]]


@dataclass(frozen=True)
class Taps:
    """How each value of a resized axis is made: the values it reads, [out, K], and their weights, 0 where fewer."""

    index: NDArray[np.int64]
    weight: NDArray[np.float64]

    def cut(self, start: int, length: int) -> Taps:
        """Those of `length` values from `start` on."""
        return Taps(self.index[start : start + length], self.weight[start : start + length])

    @property
    def float32(self) -> Floats:
        """The weights as an axis that grows has them, [out, K]."""
        return self.weight.astype(np.float32)

    def in_steps(self) -> tuple[NDArray[np.int32], int]:
        """The weights in whole steps of 2^-p that fit 16 bits, [out, K], and p; of the whole axis, not of a cut."""
        most = float(self.weight.max())
        bits = next((p for p in range(_MOST_BITS) if int(0.5 + most * 2 ** (p + 1)) >= 2**15), _MOST_BITS)
        scaled = self.weight * 2.0**bits
        return np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32), bits


def _triangle(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(1.0 - x, 0.0)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' cubic convolution with a = -1/2."""
    a = -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


# A filter of the distance in pixels, and how far it reaches.
_FILTERS: dict[str, tuple[Callable[[NDArray[np.float64]], NDArray[np.float64]], float]] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
}


@functools.lru_cache(64)
def taps(size: int, wanted: int, interpolation: str) -> Taps:
    """Of an axis of `size` values that becomes `wanted` ones, by one of `INTERPOLATIONS`."""
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
    weight /= np.add.accumulate(weight, axis=1)[:, -1:]  # from left to right; np.sum has an order of its own
    return Taps(np.minimum(index, size - 1), weight)


def resized_size(height: int, width: int, resize: int) -> tuple[int, int]:
    """(height, width) of an image whose shorter side is brought to `resize`."""
    long = int(resize * max(height, width) / min(height, width))
    return (resize, long) if height <= width else (long, resize)


def crop_start(size: int, crop: int) -> int:
    """Where the centre crop of an axis begins; halves go to the even number, as Python rounds."""
    return round((size - crop) / 2)


def is_whole(height: int, width: int, size: tuple[int, int]) -> bool:
    """Whether an image is resized in 8 bits: no side grows, and none ends as one pixel (ATen errs there)."""
    return min(height, width) >= min(size) > 1


@dataclass(frozen=True)
class Preprocess:
    """What preprocess.json says is done to an image.

    Args:
        image_size: height and width of the model's input, in pixels.
        resize: the shorter side is brought to this before the centre crop.
        mean, std: per channel (1 or 3), of pixels in 0..1.
        interpolation: one of `INTERPOLATIONS`.
        dtype: of the input, "float32" or "uint8" (pixels as they are; the file normalises).
        upright: whether a picture file is turned as its EXIF data say when it is opened, before all this.
    """

    image_size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    dtype: str = "float32"
    upright: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """What preprocess.json holds.

        Raises:
            ConfigError: a value is missing or none that this version knows.
        """
        for key, (allowed, is_allowed) in _ALLOWED.items():
            found = values.get(key)
            if not is_allowed(found):
                raise ConfigError(f"preprocess.json: {key}", found, allowed)
        mean, std = tuple(values["mean"]), tuple(values["std"])
        if not len(mean) == len(std) == values["channels"]:
            raise ConfigError(
                "preprocess.json: mean", list(mean), "one number per channel, and as many in std"
            )
        if values["resize"] < values["image_size"]:
            allowed = f"at least image_size ({values['image_size']})"
            raise ConfigError("preprocess.json: resize", values["resize"], allowed)
        sizes, upright = (values["image_size"], values["resize"]), bool(values.get("upright"))
        return cls(*sizes, mean, std, values["interpolation"], values["input"]["dtype"], upright)

    @property
    def channels(self) -> int:
        """Of the input."""
        return len(self.mean)

    def batch(self, images: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """[N, C, S, S] of images of any sizes, each as `__call__` takes it."""
        return np.concatenate([self(image) for image in images])

    def __call__(self, image: NDArray[Any]) -> NDArray[Any]:
        """The input for one image.

        Args:
            image: uint8 [H, W, C] of 1 or 3 channels, or [H, W].

        Returns:
            [1, channels, image_size, image_size], of `dtype`.

        Raises:
            ConfigError: it is no such image.
        """
        normalised = self._normalised(self._centre(_of_channels(image, self.channels)))
        if self.dtype == "uint8":  # the way back is that of verification, which starts from normalised images
            return IntegerIO(self.mean, self.std, "uint8", 1.0, 0).pixels(normalised)
        return normalised

    def _centre(self, image: Pixels) -> Floats:
        """[S, S, C], 0..255, of [H, W, C]."""
        height, width = image.shape[:2]
        size = resized_size(height, width, self.resize)
        starts = [crop_start(one, self.image_size) for one in size]
        if size == (height, width):
            top, left = starts
            return image[top : top + self.image_size, left : left + self.image_size].astype(np.float32)
        resize_axis: _Axis = _bytes_axis if is_whole(height, width, size) else _float_axis
        columns = taps(width, size[1], self.interpolation)
        rows = taps(height, size[0], self.interpolation)
        found = resize_axis(image.swapaxes(0, 1), columns, starts[1], self.image_size).swapaxes(0, 1)
        return resize_axis(found, rows, starts[0], self.image_size).astype(np.float32)

    def _normalised(self, pixels: Floats) -> Floats:
        """float32 [1, C, S, S] of [S, S, C]; each operation is rounded by itself."""
        mean, std = (np.asarray(value, np.float32).reshape(-1, 1, 1) for value in (self.mean, self.std))
        found = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
        found /= np.float32(255)
        found -= mean
        found /= std
        return found


def _is_numbers(value: object, least: float = -np.inf) -> bool:
    return isinstance(value, list) and all(type(v) in (int, float) and least < v < np.inf for v in value)


def _is_side(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_SIDE


# Of each key of preprocess.json: what it may be, in words, and as a question.
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "image_size": (f"a whole number of pixels, 1 to {_MOST_SIDE}", _is_side),
    "resize": (f"a whole number of pixels, 1 to {_MOST_SIDE}", _is_side),
    "interpolation": (" | ".join(INTERPOLATIONS), lambda value: value in INTERPOLATIONS),
    "channels": ("1 | 3", lambda value: type(value) is int and value in (1, 3)),
    "mean": ("a number a channel", _is_numbers),
    "std": ("a positive number a channel", lambda value: _is_numbers(value, 0.0)),
    "crop": ("center", lambda value: value == "center"),
    "upright": (
        "true | false",
        lambda value: value is None or isinstance(value, bool),
    ),  # none in older bundles
    "input": (
        "an input of dtype float32 | uint8",
        lambda value: isinstance(value, dict) and value.get("dtype") in ("float32", "uint8"),
    ),
}


def _of_channels(image: NDArray[Any], channels: int) -> Pixels:
    """uint8 [H, W, channels]: grey is repeated, colour is turned grey where needed."""
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


def _bytes_axis(image: NDArray[Any], axis: Taps, start: int, length: int) -> Pixels:
    """The first axis of [size, ...] resized, `length` values from `start` on, in 8 bits."""
    if axis.index.shape[1] == 1:  # nearest: nothing is computed
        return image[axis.index[start : start + length, 0]]
    steps, bits = axis.in_steps()
    flat, found = _rows(image), np.full((length, image[0].size), 1 << bits >> 1, np.int32)
    for index, step in zip(axis.cut(start, length).index.T, steps[start : start + length].T, strict=True):
        found += flat[index] * step[:, None]
    found >>= bits
    return np.clip(found, 0, 255).astype(np.uint8).reshape(length, *image.shape[1:])


def _float_axis(image: NDArray[Any], axis: Taps, start: int, length: int) -> Floats:
    """The first axis of [size, ...] resized, `length` values from `start` on, in float32."""
    part, flat = axis.cut(start, length), _rows(image).astype(np.float32)
    weights = part.float32
    found = flat[part.index[:, 0]] * weights[:, :1]
    for tap in range(1, weights.shape[1]):
        found += flat[part.index[:, tap]] * weights[:, tap : tap + 1]
    return found.reshape(length, *image.shape[1:])


def _rows(image: NDArray[Any]) -> NDArray[Any]:
    """[size, ...] as [size, rest], so that a tap reads whole rows of memory."""
    return np.ascontiguousarray(image).reshape(len(image), -1)
