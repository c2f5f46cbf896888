"""The conversion of a Hugging Face image processor to a `Preprocessing`.

The processor's class and many settings (rescaling, offsets, a second normalisation) are not read. Instead, black,
white and red pictures are passed through it. The results reveal size, mean, standard deviation and channel
order.
"""

from __future__ import annotations

from typing import Any

from PIL import Image
from torch import Tensor

from qatkit.config.schema import ModelConfig
from qatkit.data.preprocessing import Preprocessing
from qatkit_verify.errors import ConfigError

# Pillow's numbers. Lanczos is not supported here, and bicubic is closest to it.
_INTERPOLATIONS = {0: "nearest", 1: "bicubic", 2: "bilinear", 3: "bicubic"}
_SQUEEZED_FROM = 384  # ConvNeXt's processor crops only if the input is smaller than this


def preprocessing_of(processor: Any, config: ModelConfig) -> Preprocessing:
    """Returns the `Preprocessing` that does the same as `processor` to square pictures.

    An exception is Lanczos resampling, which becomes bicubic.

    Raises:
        ConfigError: the processor's outputs are not square, or it reorders the channels.
    """
    black, white, red = (_tried(processor, colour) for colour in ((0, 0, 0), (255, 255, 255), (255, 0, 0)))
    height, width = black.shape[-2:]
    if height != width:
        raise ConfigError(
            "model.weights", config.weights, f"weights for square inputs, not {height} x {width}"
        )
    middle = height // 2
    low, high, mixed = (picture[:, middle, middle].double() for picture in (black, white, red))
    if not mixed.allclose(high.where(high.new_tensor([1, 0, 0]).bool(), low), atol=1e-4):
        allowed = "weights for pictures in RGB; these need another order of the channels"
        raise ConfigError("model.weights", config.weights, allowed)
    std = 1 / (high - low)
    return Preprocessing(
        image_size=height,
        resize=max(height, _shorter_side(processor, height)),
        mean=tuple(_rounded(-low * std)),
        std=tuple(_rounded(std)),
        interpolation=_INTERPOLATIONS.get(int(processor.resample), "bilinear"),
    )


def _tried(processor: Any, colour: tuple[int, int, int]) -> Tensor:
    """Returns the processed picture of one colour, float [C, H, W]."""
    found: Tensor = processor(images=Image.new("RGB", (600, 600), colour), return_tensors="pt")[
        "pixel_values"
    ][0]
    return found


def _shorter_side(processor: Any, image_size: int) -> int:
    """Returns the length of the shorter side before the centre crop, in pixels."""
    size = dict(processor.size) if getattr(processor, "do_resize", True) else {}
    side = size.get("shortest_edge") or min(size.get("height", image_size), size.get("width", image_size))
    share = getattr(processor, "crop_pct", None)
    if share and (side < _SQUEEZED_FROM or getattr(processor, "do_center_crop", None)):
        side = side / share
    return int(side)


def _rounded(values: Tensor) -> list[float]:
    """Returns the values rounded to 6 digits, which removes float32's rounding errors."""
    return [round(value, 6) for value in values.tolist()]
