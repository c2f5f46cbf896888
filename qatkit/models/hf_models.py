"""Hugging Face's image classifiers (the extra `transformers`): `model.name=hf/NAME`.

    hf/vit                              an architecture, random weights; model.kwargs are its configuration
    hf/google/vit-base-patch16-224      an id of the hub: its configuration, and its weights where
                                        model.weights is DEFAULT or a revision (branch, tag, commit)
    hf//data/my_model, hf/./my_model    the same from a folder that `save_pretrained` wrote

The model is theirs with module paths and state_dict as they are, but gives its logits [N, classes] alone. Images are
prepared as their image processor does, except that the picture keeps its proportions where that one squeezes it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from qatkit.config.schema import ModelConfig
from qatkit.data.preprocessing import Preprocessing
from qatkit.models.hub import how_to_fetch
from qatkit.models.image_processor import preprocessing_of
from qatkit_verify.errors import ConfigError, did_you_mean, first_line

PREFIX = "hf/"
DEFAULT = "DEFAULT"
# Settings of every configuration that its own dictionary leaves out.
_GENERAL = {"attn_implementation"}


def builder(name: str) -> Callable[..., Any]:
    """The function that builds the model `name` with random weights; its arguments change the configuration.

    Raises:
        ConfigError: transformers is not installed, or there is no such architecture or folder.
    """
    _transformers(name)
    plain = name.removeprefix(PREFIX)
    known = _architectures()
    if "/" not in plain and plain not in known:
        near = did_you_mean(plain, known)
        allowed = f"an architecture with an image classifier{near}, an id of the hub or a folder"
        raise ConfigError("model.name", name, allowed)
    if _is_path(plain) and not Path(plain, "config.json").is_file():
        raise ConfigError("model.name", name, "a folder with a config.json, as save_pretrained writes it")
    return functools.partial(_random, name)


def pretrained(config: ModelConfig, classes: int | None) -> nn.Module:
    """The model with the weights of the hub or of the folder; the head is made afresh where `classes` is not theirs.

    Raises:
        ConfigError: unknown name, weights that cannot be fetched (says where to put them), or that do not fit.
    """
    builder(config.name)
    transformers = _transformers(config.name)
    revision = _revision(config)
    kwargs = {key: value for key, value in config.kwargs.items() if key != "num_classes"}
    settings = _settings(config.name, kwargs, revision)
    if classes is not None:
        settings.num_labels = classes
    try:
        model, report = transformers.AutoModelForImageClassification.from_pretrained(
            config.name.removeprefix(PREFIX),
            config=settings,
            revision=revision,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise ConfigError("model.weights", config.weights, reason=_not_there(config.name, error)) from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "model.weights", config.weights, f"weights of {config.name} ({first_line(error)})"
        ) from error
    _check_loaded(model, report, config)
    return _with_logits(model)


def preprocessing(config: ModelConfig) -> Preprocessing:
    """How their image processor prepares images for `model.weights`.

    Raises:
        ConfigError: unknown name, an image processor that cannot be fetched or says what can't be done here.
    """
    builder(config.name)
    revision = _revision(config)
    try:
        processor = _transformers(config.name).AutoImageProcessor.from_pretrained(
            config.name.removeprefix(PREFIX), revision=revision
        )
    except OSError as error:
        raise ConfigError("model.weights", config.weights, reason=_not_there(config.name, error)) from error
    return preprocessing_of(processor, config)


def _random(name: str, num_classes: int | None = None, **settings: Any) -> nn.Module:
    config = _settings(name, settings)
    if num_classes is not None:
        config.num_labels = num_classes
    config.architectures = config.architectures or []  # null is a TypeError where a type has two classifiers
    try:
        model: nn.Module = _transformers(name).AutoModelForImageClassification.from_config(
            config, dtype=torch.float32
        )
    except (ImportError, RuntimeError, ArithmeticError, AttributeError) as error:
        # What a configuration that fits together nowhere raises, from somewhere in the model.
        raise ConfigError(
            "model.kwargs", settings, f"arguments that {name} takes ({first_line(error)})"
        ) from error
    return _with_logits(model)


def _settings(name: str, changes: Mapping[str, Any], revision: str | None = None) -> Any:
    """The configuration of an architecture, an id or a folder, with `changes`.

    Raises:
        ConfigError: it cannot be fetched, or has no setting of such a name or value.
    """
    transformers, plain = _transformers(name), name.removeprefix(PREFIX)
    from huggingface_hub.errors import StrictDataclassError

    try:
        if plain in _architectures():
            own = transformers.CONFIG_MAPPING[plain]
            _check_names(own().to_dict() | own.attribute_map, changes, own.__name__)
            return own(**changes)
        found = transformers.AutoConfig.from_pretrained(plain, revision=revision)
        _check_names(found.to_dict() | found.attribute_map, changes, type(found).__name__)
        return transformers.AutoConfig.from_pretrained(plain, revision=revision, **changes)
    except OSError as error:
        raise ConfigError("model.name", name, reason=_not_there(name, error)) from error
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())
        raise ConfigError("model.kwargs", dict(changes), f"arguments that {name} takes ({reason})") from error


def _check_names(known: Iterable[str], changes: Mapping[str, Any], what: str) -> None:
    """A configuration takes any name without a word; a typo would change nothing."""
    names = {*known, *_GENERAL}
    for key, value in changes.items():
        if key not in names:
            allowed = f"a setting of {what}{did_you_mean(key, names)}"
            raise ConfigError(f"model.kwargs.{key}", value, allowed)


def _check_loaded(model: Any, report: Mapping[str, Any], config: ModelConfig) -> None:
    """Every parameter comes from the weights, but for those of the head.

    Raises:
        ConfigError: others are missing or of another shape.
    """
    body = f"{model.base_model_prefix}."
    keys = [*report["missing_keys"], *(mismatch[0] for mismatch in report["mismatched_keys"])]
    wrong = sorted(key for key in keys if key.startswith(body))
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        allowed = f"weights of this model: {wrong[0]}{more} missing or of another shape (see model.kwargs)"
        raise ConfigError("model.weights", config.weights, allowed)


def _with_logits(model: nn.Module) -> nn.Module:
    """`model`, whose forward takes pixels [N, C, H, W] and gives logits [N, classes] instead of a ModelOutput.

    A subclass of its own type, so that module paths and state_dict stay as they are.

    Raises:
        ConfigError: its forward takes no pixels (ImageGPT's takes the numbers of colours).
    """
    theirs: Any = type(model)
    if "pixel_values" not in inspect.signature(theirs.forward).parameters:
        raise ConfigError(
            "model.name", theirs.__name__, "a model of pictures (pixel_values); this one has none"
        )

    def forward(self: nn.Module, pixel_values: Tensor) -> Tensor:
        logits: Tensor = theirs.forward(self, pixel_values=pixel_values).logits
        return logits

    members = {"forward": forward, "__module__": theirs.__module__, "__doc__": theirs.__doc__}
    model.__class__ = type(theirs.__name__, (theirs,), members)
    return model


def _revision(config: ModelConfig) -> str | None:
    """What `model.weights` asks the hub for.

    Raises:
        ConfigError: an architecture has no weights, a folder has no revisions.
    """
    plain = config.name.removeprefix(PREFIX)
    if plain in _architectures():
        allowed = (
            f"null: {config.name} is an architecture; weights have an id (hf/google/vit-base-patch16-224)"
        )
        raise ConfigError("model.weights", config.weights, allowed)
    if _is_path(plain) and config.weights != DEFAULT:
        raise ConfigError("model.weights", config.weights, f"{DEFAULT} for the weights of a folder, or null")
    return None if config.weights == DEFAULT else config.weights


def _is_path(plain: str) -> bool:
    return plain.startswith(("/", ".", "~")) or Path(plain).is_dir()


def _not_there(name: str, error: BaseException) -> str:
    plain = name.removeprefix(PREFIX)
    if _is_path(plain):
        reason = first_line(error)[:120]
        return f"expected a folder that save_pretrained wrote, of the model and of its image processor ({reason})"
    return how_to_fetch(plain, error)


def _architectures() -> list[str]:
    """The model types that have an image classifier."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    return list(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)


def _transformers(name: str) -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        reason = f"the model needs the extra transformers: pip install 'qatkit[transformers]' ({error})"
        raise ConfigError("model.name", name, reason=reason) from error
    found: ModuleType = transformers
    return found
