"""The preprocessing of a run: the configuration completes or overrides that of the weights or the source."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from qatkit.config.schema import DataConfig
from qatkit.data.preprocessing import KEYS, Preprocessing
from qatkit_verify.errors import ConfigError
from qatkit_verify.fitting import LEVELS

# Settings that every picture needs, with the values of ImageNet models as examples.
_EXAMPLES = {"image_size": "224", "mean": "[0.485,0.456,0.406]", "std": "[0.229,0.224,0.225]"}


def resolve_preprocessing(config: DataConfig, base: Preprocessing | None) -> Preprocessing:
    """Returns `base` with the settings of the configuration, which override it.

    If `data.resize` is null, and `base` is None or `data.image_size` is set, there is no crop margin.

    Args:
        config: the data group.
        base: the preprocessing of the weights or of the source; None if neither defines one.

    Raises:
        ConfigError: a required value is neither configured nor in `base`, a value is out of range, or two
            settings exclude each other.
    """
    chosen: dict[str, Any] = {"image_size": config.image_size or getattr(base, "image_size", None)}
    for name, key in KEYS.items():
        own = getattr(config, key)
        chosen[name] = getattr(base or Preprocessing, name) if own is None else own
    chosen |= _normalisation(config, base, chosen["pixels"], chosen["order"])
    _check_complete(chosen)
    _check_fit(config, chosen["fit"])
    if config.policy != "none" and len(chosen["mean"]) not in (1, 3):
        allowed = (
            f"none, since policies support 1 or 3 channels and data.mean has {len(chosen['mean'])} numbers"
        )
        raise ConfigError("data.policy", config.policy, allowed)
    resize = config.resize
    if resize is None:
        resize = chosen["image_size"] if base is None or config.image_size is not None else base.resize
    if chosen["fit"] != "crop":
        resize = chosen["image_size"]
    interpolation = base.interpolation if base else "bilinear"
    return Preprocessing(resize=resize, interpolation=interpolation, **chosen)


def _check_complete(chosen: Mapping[str, Any]) -> None:
    """Raises ConfigError that names every missing key, with an example value."""
    missing = [key for key in _EXAMPLES if chosen[key] is None]
    if missing:
        typed = " ".join(shlex.quote(f"data.{key}={_EXAMPLES[key]}") for key in missing)
        raw = (
            ""
            if missing == ["image_size"]
            else f" (or data.pixels={LEVELS} if the model's input has this range)"
        )
        allowed = f"a value, since neither model.weights nor the source has one; for example {typed}{raw}"
        raise ConfigError(f"data.{missing[0]}", None, allowed)


def _normalisation(
    config: DataConfig, base: Preprocessing | None, pixels: str, order: str
) -> dict[str, tuple[float, ...] | None]:
    """Returns mean and std by name, each as configured.

    If one is not configured, it comes from `base` in the channel order `order`, provided that `base` has
    pixels in the range `pixels`. Failing that, the mean is 0 and the standard deviation 1 for pixels in
    0..255; both are None for pixels in 0..1.
    """
    found: dict[str, tuple[float, ...] | None] = {}
    count = len(config.mean or config.std or ()) or (base.channels if base else 3)
    for key, neutral in (("mean", 0.0), ("std", 1.0)):
        own = getattr(config, key)
        if own is None and base is not None and base.pixels == pixels:
            own = getattr(base, key)[:: 1 if base.order == order else -1]
        if own is None and pixels == LEVELS:
            own = (neutral,) * count
        found[key] = own if own is None else tuple(own)
    return found


def _check_fit(config: DataConfig, fit: str) -> None:
    """Raises ConfigError for settings that `fit` does not use."""
    if config.resize is not None and fit != "crop":
        raise ConfigError("data.resize", config.resize, f"null with data.fit={fit}, which does not crop")
    for key in ("pad_value", "align"):
        value = getattr(config, key)
        if value is not None and fit != "letterbox":
            raise ConfigError(f"data.{key}", value, f"null with data.fit={fit}, which adds no padding")
    if fit == "letterbox" and config.augment in ("crop_flip", "resized_crop"):
        allowed = "one of none, flip, scale_flip with data.fit=letterbox, which does not crop"
        raise ConfigError("data.augment", config.augment, allowed)
