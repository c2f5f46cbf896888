"""From pixels to the model's input: resize, crop, augment, normalise.

Everything works on batches. Images of one shape (CIFAR, digits) are stacked first and then resized together,
which is several times faster than one by one; images of many shapes (ImageNet) are resized one by one. Images are
taken one after the other, and no more than `_STACKED` bytes of them are kept at their full size: a batch of a camera's
pictures would take gigabytes.

Two rules keep the numbers those of the published accuracies. Resizing is antialiased, as Pillow does it.
An image is shrunk in uint8, as torchvision's own transforms shrink a Pillow image, but enlarged in float32:
rounding invented pixels to whole levels would only add noise.

What evaluation gives is the same in every bit on every CPU, and `qatkit_verify.preprocess` gives it without torch.
ATen's kernels of bytes are that already; its float kernels and torchvision's grey are not (fused multiply-adds, D38).

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

from qatkit.config.fields import limit_of
from qatkit.config.schema import DataConfig
from qatkit.data.policies import apply_policy
from qatkit_verify.errors import ConfigError
from qatkit_verify.preprocess import (
    GREY,
    GREY_UNIT,
    INTERPOLATIONS,
    Taps,
    crop_start,
    is_whole,
    resized_size,
    taps,
)

_CROP_AREA = (0.08, 1.0)  # share of the image, the usual ImageNet recipe
_CROP_RATIO = (3 / 4, 4 / 3)  # width / height
_CROP_ATTEMPTS = 10
_STACKED = 2**26  # bytes
_CACHED = 2**20  # bytes that are enlarged at a time, so that the next pass finds them in a core's cache


@dataclass(frozen=True)
class Preprocessing:
    """What is done to an image before the model sees it. The bundle carries it as JSON.

    Args:
        image_size: height and width of the model's input, in pixels.
        resize: the shorter side is brought to this many pixels before the centre crop; at least `image_size`.
        mean: per channel, of pixels in 0..1. Its length is the number of channels of the input.
        std: per channel, of pixels in 0..1.
        interpolation: nearest | bilinear | bicubic.
        upright: whether picture files are turned as their EXIF data say when they are opened, before all this.

    Raises:
        ConfigError: a value is out of range, or `mean` and `std` differ in length.
    """

    image_size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    upright: bool = False

    def __post_init__(self) -> None:
        limit_of(DataConfig, "image_size").check("data.image_size", self.image_size)
        if self.resize < self.image_size:
            raise ConfigError("data.resize", self.resize, f"at least data.image_size ({self.image_size})")
        if not self.mean:
            raise ConfigError("data.mean", list(self.mean), "one number per channel")
        if len(self.std) != len(self.mean) or min(self.std) <= 0:
            raise ConfigError(
                "data.std", list(self.std), f"{len(self.mean)} positive numbers, as in data.mean"
            )
        if self.interpolation not in INTERPOLATIONS:
            raise ConfigError("data.interpolation", self.interpolation, f"one of {', '.join(INTERPOLATIONS)}")

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
        self,
        images: Iterable[Image.Image | Tensor],
        augment: str,
        draws: Sequence[random.Random],
        policy: str = "none",
    ) -> Tensor:
        """Images as the model sees them in training.

        Args:
            images: Pillow images or uint8 tensors (channels, height, width), of any sizes.
            augment: one of the choices of `data.augment`; crop_flip pads by an eighth of the size, by reflection.
            draws: one source of random numbers an image.
            policy: one of the choices of `data.policy`, applied after `augment`.

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
        if policy != "none":
            batch = apply_policy(batch, policy, draws)
        return self._normalise(batch)

    def _centre(self, images: Iterable[Image.Image | Tensor]) -> Tensor:
        """Resized and centre-cropped pixels: float32 (N, channels, image_size, image_size), 0..255."""
        groups = _of_one_shape(pixels(image, self.channels) for image in images)
        scaled = [self._scale(group, self._centred(group)).float() for group in groups]
        return scaled[0] if len(scaled) == 1 else torch.cat(scaled)

    def _centred(self, array: Tensor) -> tuple[int, int]:
        """(height, width) that `array` is brought to before its centre crop."""
        return resized_size(array.shape[-2], array.shape[-1], self.resize)

    def _scale(self, array: Tensor, size: tuple[int, int]) -> Tensor:
        """The centre crop of `array` (N, channels, height, width) resized to `size`."""
        height, width = array.shape[-2:]
        top, left = (crop_start(side, self.image_size) for side in size)
        crop = slice(top, top + self.image_size), slice(left, left + self.image_size)
        if size == (height, width):
            return array[..., crop[0], crop[1]]
        if is_whole(height, width, size):
            return _shrunk(array, size, self.interpolation)[..., crop[0], crop[1]]
        along = [taps(*sides, self.interpolation) for sides in zip((height, width), size, strict=True)]
        cut = [axis.cut(start, self.image_size) for axis, start in zip(along, (top, left), strict=True)]
        return _enlarged(array, cut[0], cut[1])

    def _resized_crop(self, array: Tensor, draw: random.Random) -> Tensor:
        """A random rectangle of `array` (channels, height, width) brought to the input's size, float32."""
        top, left, height, width = _random_rectangle(array.shape[-2], array.shape[-1], draw)
        crop = array[None, :, top : top + height, left : left + width]
        return self._scale(crop, (self.image_size, self.image_size))[0].float()

    def _normalise(self, batch: Tensor) -> Tensor:
        """float32 pixels (N, channels, height, width) in 0..255, changed in place to the model's scale."""
        mean = torch.tensor(self.mean, dtype=torch.float32).view(-1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float32).view(-1, 1, 1)
        return batch.div_(255).sub_(mean).div_(std)


def _shrunk(array: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """uint8 (N, channels, height, width) resized to `size` in 8 bits.

    torchvision's `resize` computes in float32 where a CPU has no AVX2, and is up to a level off there.
    """
    if interpolation == "nearest":
        return nn_functional.interpolate(array, size, mode="nearest")
    return nn_functional.interpolate(array, size, mode=interpolation, align_corners=False, antialias=True)


def _enlarged(array: Tensor, rows: Taps, columns: Taps) -> Tensor:
    """uint8 (N, channels, height, width) resized in float32, by the definition of `qatkit_verify.preprocess`."""
    shape = (*array.shape[:2], len(rows.index), len(columns.index))
    found = torch.empty(shape)
    images = max(1, _CACHED // (4 * math.prod(shape[1:])))
    for part, place in zip(array.split(images), found.split(images), strict=True):
        flat = part.float().reshape(-1, part.shape[-1])
        wide = _resample(flat, columns, 1, flat.new_empty(len(flat), shape[-1]))
        _resample(wide.view(*part.shape[:-1], shape[-1]), rows, 2, place)
    return found


def _resample(array: Tensor, axis: Taps, dim: int, into: Tensor) -> Tensor:
    """float32 `array` resized along `dim`: products and sums are each rounded by themselves, none is fused."""
    index, weights = torch.from_numpy(axis.index), torch.from_numpy(axis.float32)
    weights = weights[:, None] if dim == 2 else weights
    torch.mul(array.index_select(dim, index[:, 0]), weights[..., 0], out=into)
    for tap in range(1, index.shape[1]):
        into.add_(array.index_select(dim, index[:, tap]).mul_(weights[..., tap]))
    return into


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


def as_tensor(image: Image.Image | Tensor) -> Tensor:
    """An image as (channels, height, width), its own channels; of Pillow's the channels are innermost in memory."""
    if not isinstance(image, Image.Image):
        return image
    array = torch.from_numpy(np.array(image if image.mode in ("L", "RGB") else image.convert("RGB")))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def pixels(image: Image.Image | Tensor, channels: int) -> Tensor:
    """An image as uint8 (channels, height, width); grey is repeated, colour is turned grey where needed.

    Raises:
        ConfigError: the image is neither a Pillow image nor a uint8 tensor with three axes, or its channels
            cannot be brought to `channels`.
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
    raise ConfigError(
        "data.mean", f"{channels} channels", reason=f"the images have {array.shape[0]} channels"
    )


def decoded(image: Image.Image | Tensor) -> NDArray[np.uint8]:
    """An image as uint8 (height, width, channels), its own channels, before anything is done to it."""
    return as_tensor(image).permute(1, 2, 0).contiguous().numpy()


def _grey(array: Tensor) -> Tensor:
    """uint8 (1, height, width) of colour: the weighted sum's whole part, from sums that float32 holds exactly."""
    red, green, blue = array.unbind(0)
    total = red.mul(float(GREY[0])).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])
    return total.div_(GREY_UNIT).to(torch.uint8)[None]


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


def resolve_preprocessing(config: DataConfig, base: Preprocessing | None) -> Preprocessing:
    """`base` with what the configuration sets; an image size without a resize means no margin to crop.

    Raises:
        ConfigError: something is neither configured nor in `base`, or the policy cannot change such images.
    """
    chosen: dict[str, Any] = {}
    for key in ("image_size", "mean", "std"):
        own = getattr(config, key)
        chosen[key] = own if own is not None else getattr(base, key, None)
        if chosen[key] is None:
            raise ConfigError(
                f"data.{key}", None, "a value, since neither model.weights nor the source has one"
            )
    if config.policy != "none" and len(chosen["mean"]) not in (1, 3):
        allowed = f"none, since data.mean says that images have {len(chosen['mean'])} channels; policies take 1 or 3"
        raise ConfigError("data.policy", config.policy, allowed)
    resize = config.resize
    if resize is None:
        resize = chosen["image_size"] if base is None or config.image_size is not None else base.resize
    interpolation = base.interpolation if base else "bilinear"
    return Preprocessing(
        chosen["image_size"], resize, tuple(chosen["mean"]), tuple(chosen["std"]), interpolation
    )
