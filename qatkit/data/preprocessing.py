"""Preprocessing from pixels to the model's input: resize, crop or fill, augment, normalise, order axes.

Everything works on batches. Images of one shape (CIFAR, digits) are stacked and resized together, which is several
times faster than one by one; images of many shapes (ImageNet) are resized one by one. Images are read one after the
other, and at most `_STACKED` bytes of them are held at their full size, since a batch of camera pictures would take
gigabytes.

Two rules reproduce the published accuracies. Resizing is antialiased, as in Pillow. An image is shrunk in uint8, as
torchvision's own transforms do with a Pillow image, but enlarged in float32, because rounding interpolated pixels to
whole levels would only add noise.

The result in evaluation is bit for bit the same on every CPU, and `qatkit_verify.preprocess` computes it without torch.
ATen's kernels for bytes ensure this already; its float kernels and torchvision's conversion to grey do not (fused
multiply-adds; decision 38).

The caller passes one `random.Random` per training image, so that its augmentation depends neither on its batch nor on
the worker that prepares it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from qatkit.config.fields import limit_of
from qatkit.config.schema import DataConfig
from qatkit.data.augmentations import flipped, mirrored, random_rectangle, random_zoom, shifted
from qatkit.data.policies import apply_policy
from qatkit.data.resizing import resized
from qatkit_verify.errors import ConfigError, counted, did_you_mean
from qatkit_verify.fitting import (
    PAD_VALUE,
    UNIT,
    Fitting,
    Sides,
    as_typed,
    covers,
    fitting,
    sides,
    written,
)
from qatkit_verify.preprocess import GREY, GREY_UNIT, INTERPOLATIONS, unit_scale

_STACKED = 2**26  # approximate maximum number of bytes in a stack
# Fields of `Preprocessing` that have a usual value, and the key of the data group that sets each.
KEYS = {"fit": "fit", "pad_value": "pad_value", "align": "align", "order": "channels", "layout": "layout",
        "pixels": "pixels"}  # fmt: skip


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of images for a model; the bundle holds it as JSON.

    Args:
        image_size: height and width of the model's input, in pixels: one number for both, or two.
        resize: for fit "crop", the size that an image covers before the centre crop: one number (its shorter
            side), or height and width; at least `image_size`.
        mean: mean of each channel of the model's input, in the units of `pixels`. Its length is the number of
            channels.
        std: standard deviation of each channel, in the units of `pixels`.
        interpolation: method of resizing: nearest | bilinear | bicubic.
        upright: whether picture files are turned upright by their EXIF data when they are opened, before
            everything else.
        fit: how a picture is fitted to the input: crop | resize | letterbox (`qatkit_verify.fitting`).
        pad_value: for fit "letterbox", the value of the padding, in 0..255.
        align: for fit "letterbox", the place of the picture in the input: center | top_left.
        order: order of the channels: rgb | bgr.
        layout: axes of the model's input: nchw | nhwc.
        pixels: range of the pixels before they are normalised: 0..1 | 0..255.

    Raises:
        ConfigError: a value is out of range, or `mean` and `std` differ in length.
    """

    image_size: int | Sides
    resize: int | Sides
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    upright: bool = False
    fit: str = "crop"
    pad_value: float = PAD_VALUE
    align: str = "center"
    order: str = "rgb"
    layout: str = "nchw"
    pixels: str = UNIT

    def __post_init__(self) -> None:
        limit_of(DataConfig, "image_size").check("data.image_size", self.image_size)
        limit_of(DataConfig, "resize").check("data.resize", self.resize)
        for name in ("image_size", "resize"):
            object.__setattr__(self, name, written(getattr(self, name)))
        if not covers(self.resize, self.image_size):
            allowed = f"a size that covers data.image_size={as_typed(self.image_size)}"
            raise ConfigError("data.resize", as_typed(self.resize), allowed)
        if not self.mean:
            raise ConfigError("data.mean", list(self.mean), "one number per channel")
        if len(self.std) != len(self.mean) or min(self.std) <= 0:
            allowed = f"one positive number for each number in data.mean ({len(self.mean)})"
            raise ConfigError("data.std", list(self.std), allowed)
        if self.interpolation not in INTERPOLATIONS:
            near = did_you_mean(str(self.interpolation), INTERPOLATIONS, 1)
            allowed = f"one of {', '.join(INTERPOLATIONS)} in the preprocessing of the model or of the source"
            raise ConfigError("interpolation", self.interpolation, f"{allowed}{near}")
        for name, key in KEYS.items():
            limit_of(DataConfig, key).check(f"data.{key}", getattr(self, name))
        if self.order != "rgb" and self.channels != 3:
            allowed = f"rgb, since colours need 3 numbers in data.mean and it has {self.channels}"
            raise ConfigError("data.channels", self.order, allowed)

    @property
    def channels(self) -> int:
        """Number of channels of the model's input."""
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one preprocessed image, in the order of `layout`."""
        height, width = sides(self.image_size)
        return (height, width, self.channels) if self.layout == "nhwc" else (self.channels, height, width)

    @property
    def unit_mean(self) -> tuple[float, ...]:
        """The mean for pixels in 0..1."""
        return unit_scale(self.mean, self.pixels)

    @property
    def unit_std(self) -> tuple[float, ...]:
        """The standard deviation for pixels in 0..1."""
        return unit_scale(self.std, self.pixels)

    def as_dict(self) -> dict[str, object]:
        """Returns plain values for JSON, without defaults (crop, RGB, NCHW, pixels in 0..1)."""
        values: dict[str, object] = {
            "channels": self.channels,
            "image_size": as_typed(self.image_size),
            "resize": as_typed(self.resize),
            "mean": list(self.mean),
            "std": list(self.std),
            "interpolation": self.interpolation,
            "upright": self.upright,
        }
        if self.fit != "crop":
            values["fit"] = self.fit
        if self.fit == "letterbox":
            values |= {"pad_value": self.pad_value, "align": self.align}
        if self.order != "rgb":
            values["channel_order"] = self.order.upper()
        if self.layout != "nchw":
            values["layout"] = self.layout.upper()
        if self.pixels != UNIT:
            values["pixels"] = self.pixels
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocessing:
        """Returns the preprocessing from the values of `as_dict`."""
        known = {key: value for key, value in values.items() if key not in ("channels", "channel_order")}
        order, layout = values.get("channel_order", "RGB"), values.get("layout", "NCHW")
        known |= {"order": order.lower(), "layout": layout.lower()}
        return cls(**known | {"mean": tuple(values["mean"]), "std": tuple(values["std"])})

    def eval_batch(self, images: Iterable[Image.Image | Tensor]) -> Tensor:
        """Returns images, preprocessed for evaluation.

        Args:
            images: Pillow images or uint8 tensors (channels, height, width), of any sizes.

        Returns:
            float32 (len(images), *shape), normalised.
        """
        return self._finished(self._fitted(images))

    def train_batch(
        self,
        images: Iterable[Image.Image | Tensor],
        augment: str,
        draws: Sequence[random.Random],
        policy: str = "none",
    ) -> Tensor:
        """Returns images, augmented and preprocessed for training.

        Args:
            images: Pillow images or uint8 tensors (channels, height, width), of any sizes.
            augment: one of the choices of `data.augment`. crop_flip shifts an image by up to an eighth of its
                height and width, and fills the rest by reflection.
            draws: one source of random numbers per image.
            policy: one of the choices of `data.policy`, applied after `augment`.

        Returns:
            float32 (len(images), *shape), normalised.
        """
        if (
            self.fit == "letterbox" and augment == "flip"
        ):  # mirror only the picture, not its position in the input
            batch = self._fitted(mirrored((pixels(image, self.channels) for image in images), draws))
        elif augment == "resized_crop":
            crops = [
                self._resized_crop(pixels(image, self.channels), draw)
                for image, draw in zip(images, draws, strict=True)
            ]
            batch = torch.stack(crops)
        elif augment == "scale_flip":
            arrays = (pixels(image, self.channels) for image in images)
            zoomed = [
                self._placed(array[None], self.zoomed((array.shape[-2], array.shape[-1]), draw))
                for array, draw in zip(arrays, draws, strict=True)
            ]
            batch = torch.cat(zoomed)
        else:
            batch = self._fitted(images)
        if augment == "crop_flip":
            batch = shifted(batch, draws)
        if augment != "none" and (self.fit != "letterbox" or augment == "scale_flip"):
            batch = flipped(batch, draws)
        if policy != "none":
            batch = apply_policy(batch, policy, draws)
        return self._finished(batch)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns `count` images of noise with the shape and range of preprocessed images.

        They are standard normal. For a model that expects pixels in 0..255, pixels are drawn uniformly from
        that range and then normalised.
        """
        if self.pixels == UNIT:
            return torch.randn(count, *self.shape, generator=generator)
        drawn = torch.rand(count, self.channels, *sides(self.image_size), generator=generator)
        return self._finished(drawn.mul_(255))

    def _fitted(self, images: Iterable[Image.Image | Tensor]) -> Tensor:
        """Returns pixels at the input's height and width: float32 (N, channels, height, width), 0..255."""
        groups = _of_one_shape(pixels(image, self.channels) for image in images)
        fitted = [self._of_input_size(group) for group in groups]
        return fitted[0] if len(fitted) == 1 else torch.cat(fitted)

    def zoomed(self, picture: Sides, draw: random.Random) -> Fitting:
        """Returns `fitting` of a picture (height, width) with a random zoom and a random position."""
        return random_zoom(self.fitting(picture).scaled, sides(self.image_size), draw)

    def fitting(self, picture: Sides) -> Fitting:
        """Returns the fitting of a picture (height, width) to the input's size in evaluation."""
        return fitting(self.fit, picture, sides(self.image_size), sides(self.resize), self.align)

    def _of_input_size(self, array: Tensor) -> Tensor:
        """Converts `array` (N, channels, height, width) to the input's size by `fit`, float32."""
        return self._placed(array, self.fitting((array.shape[-2], array.shape[-1])))

    def _placed(self, array: Tensor, how: Fitting) -> Tensor:
        """Places `array` (N, channels, height, width) in the input, float32, and pads the rest."""
        size = sides(self.image_size)
        kept = self._resized(array, how).float()
        if how.kept == size:
            return kept
        found = kept.new_full((*kept.shape[:2], *size), self.pad_value)
        (top, left), (height, width) = how.place, how.kept
        found[..., top : top + height, left : left + width] = kept
        return found

    def _resized_crop(self, array: Tensor, draw: random.Random) -> Tensor:
        """Returns a random rectangle of `array` (channels, height, width) at the input's size, float32."""
        size = sides(self.image_size)
        top, left, height, width = random_rectangle(array.shape[-2], array.shape[-1], draw, size[1] / size[0])
        crop = array[None, :, top : top + height, left : left + width]
        return self._resized(crop, Fitting(size, (0, 0), size))[0].float()

    def _resized(self, array: Tensor, how: Fitting) -> Tensor:
        """Resizes uint8 `array` (N, channels, height, width) and returns the kept part as uint8 or float32."""
        return resized(array, how, self.interpolation)

    def _finished(self, batch: Tensor) -> Tensor:
        """Converts float32 pixels (N, channels, height, width) in 0..255 to the model's input.

        Three channels are RGB. `batch` may be overwritten.
        """
        mean = torch.tensor(self.mean, dtype=torch.float32).view(-1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float32).view(-1, 1, 1)
        if self.order == "bgr":
            batch = batch.flip(1)
        if self.pixels == UNIT:
            batch = batch.div_(255)
        batch = batch.sub_(mean).div_(std)
        return batch.permute(0, 2, 3, 1).contiguous() if self.layout == "nhwc" else batch


def _of_one_shape(arrays: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields stacks of consecutive arrays (channels, height, width) of one shape, of about `_STACKED` bytes at most."""
    waiting = list[Tensor]()
    for array in arrays:
        full = len(waiting) * array.numel() > _STACKED
        if waiting and (full or array.shape != waiting[0].shape):
            yield torch.stack(waiting)
            waiting.clear()
        waiting.append(array)
    yield torch.stack(waiting)


def is_image_tensor(value: object) -> bool:
    """Returns whether `value` is a uint8 tensor (channels, height, width)."""
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 3


def as_tensor(image: Image.Image | Tensor) -> Tensor:
    """Returns an image as (channels, height, width); for Pillow images the channels are innermost in memory."""
    if not isinstance(image, Image.Image):
        return image
    array = torch.from_numpy(np.array(image if image.mode in ("L", "RGB") else image.convert("RGB")))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def pixels(image: Image.Image | Tensor, channels: int) -> Tensor:
    """Returns an image as uint8 (channels, height, width); grey is repeated and colour is converted if necessary.

    Raises:
        ConfigError: the image is neither a Pillow image nor a uint8 tensor with three axes, or its channels
            cannot be converted to `channels`.
    """
    array = as_tensor(image)
    if not is_image_tensor(array):
        got = f"{type(image).__name__} {getattr(image, 'dtype', '')} {tuple(getattr(image, 'shape', ()))}"
        raise ConfigError("data.source", got, "images that are Pillow images or uint8 tensors (C, H, W)")
    if array.shape[0] == channels:
        return array
    if array.shape[0] == 1:
        return array.expand(channels, -1, -1)
    if (array.shape[0], channels) == (3, 1):
        return _grey(array)
    accepted = f"1 or {3 if channels == 1 else channels} channels"
    why = f"since data.mean has {counted(channels, 'number')}"
    raise ConfigError("images", f"{array.shape[0]} channels", f"{accepted}, {why}")


def decoded(image: Image.Image | Tensor) -> NDArray[np.uint8]:
    """Returns an unprocessed image as uint8 (height, width, channels), with its original channels."""
    return as_tensor(image).permute(1, 2, 0).contiguous().numpy()


def _grey(array: Tensor) -> Tensor:
    """Converts colour to grey, uint8 (1, height, width): weighted sums, exact in float32 and rounded down."""
    red, green, blue = array.unbind(0)
    total = red.mul(float(GREY[0])).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])
    return total.div_(GREY_UNIT).to(torch.uint8)[None]
