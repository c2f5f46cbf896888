"""From pixels to the model's input: resize, crop, augment, normalise.

Everything works on batches. Images of one shape (CIFAR, digits) are stacked first and then resized together,
which is several times faster than one by one; images of many shapes (ImageNet) are resized one by one. Images are
taken one after the other, and no more than `_STACKED` bytes of them are kept at their full size: a batch of a camera's
pictures would take gigabytes.

Two rules keep the numbers those of the published accuracies. Resizing is antialiased, as Pillow does it.
An image is shrunk in uint8, as torchvision's own transforms shrink a Pillow image, but enlarged in float32:
rounding invented pixels to whole levels would only add noise.

Random draws of a training image come from a `random.Random` of its own, given by the caller, so that they
depend neither on the batch nor on the worker that the image falls into.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nn_functional
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from qatkit.bundle import INTERPOLATIONS
from qatkit.config.fields import limit_of
from qatkit.config.schema import DataConfig
from qatkit_verify.errors import ConfigError

_CROP_AREA = (0.08, 1.0)  # share of the image, the usual ImageNet recipe
_CROP_RATIO = (3 / 4, 4 / 3)  # width / height
_CROP_ATTEMPTS = 10
_STACKED = 2**26  # bytes


@dataclass(frozen=True)
class Preprocessing:
    """What is done to an image before the model sees it. The bundle carries it as JSON.

    Args:
        image_size: height and width of the model's input, in pixels.
        resize: the shorter side is brought to this many pixels before the centre crop; at least `image_size`.
        mean: per channel, of pixels in 0..1. Its length is the number of channels of the input.
        std: per channel, of pixels in 0..1.
        interpolation: nearest | bilinear | bicubic.

    Raises:
        ConfigError: a value is out of range, or `mean` and `std` differ in length.
    """

    image_size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        limit_of(DataConfig, "image_size").check("data.image_size", self.image_size)
        if self.resize < self.image_size:
            raise ConfigError("data.resize", self.resize, f"at least data.image_size ({self.image_size})")
        if not self.mean:
            raise ConfigError("data.mean", list(self.mean), "one number a channel")
        if len(self.std) != len(self.mean) or min(self.std) <= 0:
            raise ConfigError(
                "data.std", list(self.std), f"{len(self.mean)} positive numbers, as in data.mean"
            )
        if self.interpolation not in INTERPOLATIONS:
            raise ConfigError("data.interpolation", self.interpolation, " | ".join(INTERPOLATIONS))

    @property
    def channels(self) -> int:
        """Channels of the model's input."""
        return len(self.mean)

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        values = asdict(self) | {"mean": list(self.mean), "std": list(self.std)}
        return {"channels": self.channels} | values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocessing:
        """The inverse of `as_dict`."""
        known = {key: value for key, value in values.items() if key != "channels"}
        return cls(**known | {"mean": tuple(known["mean"]), "std": tuple(known["std"])})

    def eval_batch(self, images: Iterable[Image.Image | Tensor]) -> Tensor:
        """Images as the model sees them in evaluation.

        Args:
            images: Pillow images or uint8 tensors (channels, height, width), of any sizes.

        Returns:
            float32 (len(images), channels, image_size, image_size), normalised.
        """
        return self._normalise(self._centre(images))

    def train_batch(
        self, images: Iterable[Image.Image | Tensor], augment: str, draws: Sequence[random.Random]
    ) -> Tensor:
        """Images as the model sees them in training.

        Args:
            images: Pillow images or uint8 tensors (channels, height, width), of any sizes.
            augment: one of the choices of `data.augment`; crop_flip pads by an eighth of the size, by reflection.
            draws: one source of random numbers an image.

        Returns:
            float32 (len(images), channels, image_size, image_size), normalised.
        """
        if augment == "resized_crop":
            crops = [
                self._resized_crop(pixels(image, self.channels), draw)
                for image, draw in zip(images, draws, strict=True)
            ]
            batch = torch.stack(crops)
        else:
            batch = self._centre(images)
        if augment == "crop_flip":
            batch = _shift(batch, self.image_size // 8, draws)
        if augment != "none":
            batch = _flip(batch, draws)
        return self._normalise(batch)

    def _centre(self, images: Iterable[Image.Image | Tensor]) -> Tensor:
        """Resized and centre-cropped pixels: float32 (N, channels, image_size, image_size), 0..255."""
        size, groups = (
            [self.image_size, self.image_size],
            _of_one_shape(pixels(i, self.channels) for i in images),
        )
        return torch.cat(
            [functional.center_crop(self._scale(g, [self.resize]), size).float() for g in groups]
        )

    def _scale(self, array: Tensor, size: list[int]) -> Tensor:
        """`array` (..., height, width) resized; one number is the shorter side, two are both sides."""
        if min(array.shape[-2:]) < min(size) or max(size) == 1:  # of one pixel torch's kernel of bytes fails
            array = array.float()
        resized: Tensor = functional.resize(
            array, size, InterpolationMode(self.interpolation), antialias=True
        )
        return resized

    def _resized_crop(self, array: Tensor, draw: random.Random) -> Tensor:
        """A random rectangle of `array` (channels, height, width) brought to the input's size, float32."""
        top, left, height, width = _random_rectangle(array.shape[-2], array.shape[-1], draw)
        crop = array[:, top : top + height, left : left + width]
        return self._scale(crop, [self.image_size, self.image_size]).float()

    def _normalise(self, batch: Tensor) -> Tensor:
        """float32 pixels (N, channels, height, width) in 0..255, changed in place to the model's scale."""
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return batch.div_(255).sub_(mean).div_(std)


def _of_one_shape(arrays: Iterable[Tensor]) -> Iterator[Tensor]:
    """(channels, height, width) each, stacked as long as the shape stays the same and memory suffices."""
    waiting = list[Tensor]()
    for array in arrays:
        full = len(waiting) * array.numel() > _STACKED
        if waiting and (full or array.shape != waiting[0].shape):
            yield torch.stack(waiting)
            waiting.clear()
        waiting.append(array)
    yield torch.stack(waiting)


def is_image_tensor(value: object) -> bool:
    """Whether it is a uint8 tensor (channels, height, width)."""
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 3


def pixels(image: Image.Image | Tensor, channels: int) -> Tensor:
    """An image as uint8 (channels, height, width); grey is repeated, colour is turned grey where needed.

    Raises:
        ConfigError: the image is neither a Pillow image nor a uint8 tensor with three axes, or its channels
            cannot be brought to `channels`.
    """
    if isinstance(image, Image.Image):
        array = torch.from_numpy(np.array(image if image.mode in ("L", "RGB") else image.convert("RGB")))
        array = array[None] if array.ndim == 2 else array.permute(2, 0, 1)
    else:
        array = image
    if not is_image_tensor(array):
        got = f"{type(image).__name__} {getattr(image, 'dtype', '')} {tuple(getattr(image, 'shape', ()))}"
        raise ConfigError("data.source", got, "images must be Pillow images or uint8 tensors (C, H, W)")
    if array.shape[0] == channels:
        return array
    if array.shape[0] == 1:
        return array.expand(channels, -1, -1)
    if (array.shape[0], channels) == (3, 1):
        grey: Tensor = functional.rgb_to_grayscale(array)
        return grey
    raise ConfigError("data.mean", f"{channels} channels", f"the images have {array.shape[0]} channels")


def decoded(image: Image.Image | Tensor) -> NDArray[np.uint8]:
    """An image as uint8 (height, width, channels), its own channels, before anything is done to it."""
    if isinstance(image, Image.Image):
        array = np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        return array[..., None] if array.ndim == 2 else array
    return image.permute(1, 2, 0).contiguous().numpy()


def _shift(batch: Tensor, padding: int, draws: Sequence[random.Random]) -> Tensor:
    """Each image moved by up to `padding` pixels each way; what comes in is reflected."""
    size = batch.shape[-1]
    padded = nn_functional.pad(batch, [padding] * 4, mode="reflect")
    corners = [(draw.randint(0, 2 * padding), draw.randint(0, 2 * padding)) for draw in draws]
    crops = [
        image[:, top : top + size, left : left + size]
        for image, (top, left) in zip(padded, corners, strict=True)
    ]
    return torch.stack(crops)


def _flip(batch: Tensor, draws: Sequence[random.Random]) -> Tensor:
    """Each image mirrored left to right with probability one half, in place."""
    chosen = torch.tensor([draw.random() < 0.5 for draw in draws])
    batch[chosen] = batch[chosen].flip(-1)
    return batch


def _random_rectangle(height: int, width: int, draw: random.Random) -> tuple[int, int, int, int]:
    """(top, left, height, width) with area and aspect ratio drawn as in Inception training.

    After `_CROP_ATTEMPTS` rectangles that do not fit, the largest centred one of an allowed ratio.
    """
    low, high = _CROP_RATIO
    for _ in range(_CROP_ATTEMPTS):
        area = height * width * draw.uniform(*_CROP_AREA)
        ratio = math.exp(draw.uniform(math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return draw.randint(0, height - h), draw.randint(0, width - w), h, w
    w = min(width, max(1, round(height * high)))
    h = min(height, max(1, round(width / low)))
    return (height - h) // 2, (width - w) // 2, h, w
