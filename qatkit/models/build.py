"""The choice of a model's source by `model.name`, and the loading of its checkpoint.

A name without a dot is a torchvision model, "timm/NAME" a timm model, "hf/NAME" a Hugging Face model (with
the head that the task requires), "lite/NAME" a model of efficientnet_lite_pytorch, and "onnx/FILE" a float
ONNX file. A dotted path is a user's builder. Parameters are random, or come from the source's pretrained
`weights` or from a `checkpoint` file, which must fit exactly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn

from qatkit.config.fields import limit_of
from qatkit.config.schema import ModelConfig
from qatkit.data.preprocessing import Preprocessing
from qatkit.data.rollout import States
from qatkit.models import hf_models, lite, onnx_files, timm_models, torchvision_models
from qatkit.models.checkpoint import load, read_checkpoint
from qatkit.models.declared import Declared
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.foreign import calling, check_call

IMAGES = "classification"
# Each module has the functions builder(name), pretrained(config, classes) and preprocessing(config).
PREFIXES = {module.PREFIX: module for module in (timm_models, lite, onnx_files)}


def build(config: ModelConfig, num_classes: int | None = None, task: str = IMAGES) -> nn.Module:
    """Returns the float model in eval mode.

    Args:
        config: the settings of `model`. With both weights and a checkpoint, the parameters come from the
            checkpoint, whose training started from the weights. `weights` then only selects the model's
            arguments and the preprocessing of its images; the weights are not fetched.
        num_classes: number of classes of the data; None leaves it to the configuration and the builder.
        task: a value of `task`, which selects the head of a model that has several.

    Raises:
        ConfigError: the name or the weights are unknown, the weights cannot be fetched, the checkpoint does not
            fit or cannot be read, the numbers of classes differ, or the builder rejects `model.kwargs`, fails or
            returns no module.
    """
    classes = _classes(config, num_classes)
    # Read before the model is built, so that a bad file fails at once.
    checkpoint = None if config.checkpoint is None else read_checkpoint(config.checkpoint)
    if checkpoint is not None:
        checkpoint.chosen(config.checkpoint_key)
    if config.weights is not None and checkpoint is None:
        model: nn.Module = _source_of_weights(config, task).pretrained(config, classes)
    else:
        model = _construct(_like_weights(config), _builder(config.name, task), classes)
    if checkpoint is not None:
        load(model, checkpoint, config)
    with calling("model.name", config.name, model):
        model.eval()  # a user's eval() may return None
    return model


def weights_preprocessing(config: ModelConfig, task: str = IMAGES) -> Preprocessing | None:
    """Returns the preprocessing with which the pretrained weights were evaluated.

    None without weights, and for weights that describe none, such as those of text models and detectors.

    Raises:
        ConfigError: the name or the weights are unknown, or the preprocessing cannot be fetched or is not supported.
    """
    if config.weights is None:
        return None
    found: Preprocessing | None = _source_of_weights(config, task).preprocessing(config)
    return found


def declared(config: ModelConfig, layout: str | None, task: str = IMAGES) -> Declared:
    """Returns the inputs that an ONNX file or a text model declares; an empty `Declared` for other models.

    Raises:
        ConfigError: the file or the configuration of the model is missing or cannot be used.
    """
    if config.name.startswith(onnx_files.PREFIX):
        return onnx_files.declared(config, layout)
    if config.name.startswith(hf_models.PREFIX):
        return hf_models.of_task(task).declared(config)
    return Declared()


def parameters(config: ModelConfig) -> int | None:
    """Returns the number of parameters of Hugging Face weights in a folder, without loading them; else None."""
    return hf_models.parameters(config)


def states(config: ModelConfig) -> States | None:
    """Returns the outputs of an ONNX file that are inputs of its next step (`model.kwargs.states`).

    None for other models, and if the key is not set.

    Raises:
        ConfigError: the file cannot be used, or the states do not fit it.
    """
    return onnx_files.states(config) if config.name.startswith(onnx_files.PREFIX) else None


def has_weights(name: str) -> bool:
    """Returns whether `model.weights` applies to a model of that name; False for a user's builder and an ONNX file."""
    return _source(name) not in (None, onnx_files)


def weights_classes(config: ModelConfig) -> int | None:
    """Returns the number of classes of the pretrained weights; None if it is known only after loading them.

    Raises:
        ConfigError: the name or the weights are unknown.
    """
    if _source(config.name) is not torchvision_models:
        return None
    return torchvision_models.classes(config)


def _classes(config: ModelConfig, of_data: int | None) -> int | None:
    """Returns the number of classes from the configuration and the data; None if neither defines it.

    Raises:
        ConfigError: the numbers of classes differ.
    """
    key, given = "model.num_classes", config.num_classes
    if given is None:
        key, given = "model.kwargs.num_classes", config.kwargs.get("num_classes")
    if given is not None:
        limit_of(ModelConfig, "num_classes").check(key, given)
    if given is not None and of_data is not None and given != of_data:
        raise ConfigError(key, given, f"null or {of_data}, the number of classes of the data")
    return of_data if given is None else int(given)


def _source(name: str, task: str = IMAGES) -> ModuleType | hf_models.HuggingFace | None:
    """Returns the source (module or object) of the models with such a name; None for a dotted path."""
    if name.startswith(hf_models.PREFIX):
        return hf_models.of_task(task)
    for prefix, module in PREFIXES.items():
        if name.startswith(prefix):
            return module
    return None if "." in name or ":" in name else torchvision_models


def _source_of_weights(config: ModelConfig, task: str = IMAGES) -> Any:
    source = _source(config.name, task)
    if source is None:
        allowed = "null for a builder of your own (set model.checkpoint instead)"
        raise ConfigError("model.weights", config.weights, allowed)
    return source


def _like_weights(config: ModelConfig) -> ModelConfig:
    """Returns `config` with the arguments that torchvision's `config.weights` require; those of the user win."""
    if config.weights is None or _source_of_weights(config) is not torchvision_models:
        return config
    return replace(config, kwargs=torchvision_models.arguments(config) | config.kwargs)


def _builder(name: str, task: str) -> Callable[..., Any]:
    """Returns a source's builder for `name`, or the object "package.module.fn" or "package.module:fn"."""
    source = _source(name, task)
    if source is not None:
        found: Callable[..., Any] = source.builder(name)
        return found
    own: Callable[..., Any] = resolve(name.replace(":", "."), "model.name")
    if not callable(own):
        raise ConfigError("model.name", name, f"a function or class, not {type(own).__name__}")
    return own


def _construct(config: ModelConfig, builder: Callable[..., Any], classes: int | None) -> nn.Module:
    """Calls `builder`, with the number of classes if it is known and the builder accepts it.

    Raises:
        ConfigError: the builder failed, or returned something other than a module.
    """
    kwargs = dict(config.kwargs)
    if classes is not None and _accepts_num_classes(builder):
        kwargs["num_classes"] = classes
    if _source(config.name) is None:
        check_call("model.kwargs", str(kwargs), builder, **kwargs)
        with calling("model.name", config.name, builder):
            model = builder(**kwargs)
    else:
        try:
            model = builder(**kwargs)
        except ConfigError:
            raise  # it already names what is wrong
        except (TypeError, ValueError) as error:
            allowed = f"arguments that {config.name} accepts ({first_line(error)})"
            raise ConfigError("model.kwargs", kwargs, allowed) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "model.name", config.name, f"a callable that returns an nn.Module, not {type(model).__name__}"
        )
    return model


def _accepts_num_classes(builder: Callable[..., Any]) -> bool:
    if (
        getattr(builder, "__init__", None) is nn.Module.__init__
    ):  # its signature claims to accept any argument
        return False
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):  # a builtin may have no signature
        return False
    return any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)
