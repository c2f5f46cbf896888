"""timm's models (the extra `timm`): `model.name=timm/NAME`, with `model.weights` as one of timm's tags or DEFAULT.

Weights come from the Hugging Face hub, through its cache. Images are preprocessed as in timm's evaluation of
the weights.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from qatkit.config.schema import ModelConfig
from qatkit.data.preprocessing import Preprocessing
from qatkit.models.hub import how_to_fetch
from qatkit_verify.errors import ConfigError, did_you_mean, first_line
from qatkit_verify.installed import install_extra

PREFIX = "timm/"


def builder(name: str) -> Callable[..., Any]:
    """Returns the function that builds timm's model `name` ("timm/resnet18") with random weights.

    Raises:
        ConfigError: timm is not installed, or has no such model.
    """
    timm, plain = _timm(name), name.removeprefix(PREFIX)
    known = timm.list_models()
    if plain not in known:
        tagged = " without its tag, which belongs in model.weights" if plain.split(".")[0] in known else ""
        raise ConfigError("model.name", name, f"a timm model{tagged}{did_you_mean(plain, known)}")
    return functools.partial(timm.create_model, plain)


def pretrained(config: ModelConfig, classes: int | None) -> nn.Module:
    """Returns the model with timm's weights.

    timm initialises a new head if `classes` differs from the number of classes of the weights.

    Raises:
        ConfigError: the name or the tag is unknown, the arguments are wrong, or the weights cannot be fetched (the
            message says where to put them).
    """
    found = _pretrained_config(config)
    kwargs = dict(config.kwargs) | ({} if classes is None else {"num_classes": classes})
    try:
        model: nn.Module = builder(config.name)(pretrained=True, pretrained_cfg=found.tag or None, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "model.kwargs", kwargs, f"arguments that {config.name} accepts ({first_line(error)})"
        ) from error
    except (OSError, RuntimeError) as error:  # the hub's errors are OSErrors
        raise ConfigError("model.weights", config.weights, reason=_how_to_fetch(found, error)) from error
    return model


def preprocessing(config: ModelConfig) -> Preprocessing:
    """Returns the preprocessing with which timm evaluates `model.weights`.

    Raises:
        ConfigError: the name or the tag is unknown.
    """
    data = importlib.import_module("timm.data")
    found = data.resolve_data_config(pretrained_cfg=_pretrained_config(config).to_dict())
    size = found["input_size"][1]
    return Preprocessing(
        image_size=size,
        resize=math.floor(size / found["crop_pct"]),
        mean=tuple(found["mean"]),
        std=tuple(found["std"]),
        interpolation=found["interpolation"],
    )


def _timm(name: str) -> ModuleType:
    try:
        import timm
    except ImportError as error:
        raise ConfigError(
            "model.name",
            name,
            reason=f"the model needs the extra timm; install it with {install_extra('timm')} ({error})",
        ) from error
    found: ModuleType = timm
    return found


def _pretrained_config(config: ModelConfig) -> Any:
    """Returns timm's `PretrainedCfg` for `model.weights`.

    Raises:
        ConfigError: the name or the tag is unknown.
    """
    builder(config.name)
    from timm.models import get_pretrained_cfg, list_pretrained

    plain, tag = config.name.removeprefix(PREFIX), config.weights
    full = plain if tag == "DEFAULT" else f"{plain}.{tag}"
    known = [name for name in list_pretrained(f"{plain}*") if name.split(".")[0] == plain]
    if not known or (tag != "DEFAULT" and full not in known):
        tags = ", ".join(["DEFAULT", *(name.partition(".")[2] for name in known if "." in name)])
        allowed = f"one of {tags}" if known else f"null, since {config.name} has no pretrained weights"
        raise ConfigError("model.weights", config.weights, allowed)
    return get_pretrained_cfg(full)


def _how_to_fetch(found: Any, error: BaseException) -> str:
    if found.hf_hub_id:
        return how_to_fetch(found.hf_hub_id, error)
    reason = f"the weights cannot be fetched ({first_line(error)[:120]})"
    return f"{reason}; download {found.url} into torch.hub's folder of checkpoints"
