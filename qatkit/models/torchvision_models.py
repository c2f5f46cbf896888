"""torchvision's models: `model.name=NAME`, with `model.weights` as a member of the model's enum or DEFAULT.

Pretrained weights are loaded with their own head, which is then replaced if the data have another number of classes.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models import WeightsEnum

from qatkit.config.schema import ModelConfig
from qatkit.data.preprocessing import Preprocessing
from qatkit_verify.errors import ConfigError, did_you_mean, first_line

# Models whose own initialisation is slow and warns that it will change. Only training from scratch needs it.
_INIT_WEIGHTS = ("googlenet", "inception_v3")
# Arguments that torchvision only sets together with weights. With transform_input, inputs are normalised
# again inside the model.
_OF_WEIGHTS = {
    "googlenet": {"transform_input": True, "aux_logits": False},
    "inception_v3": {"transform_input": True},
}


def builder(name: str) -> Callable[..., Any]:
    """Returns the function that builds torchvision's model `name` with random weights.

    Raises:
        ConfigError: torchvision has no such model.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if name in _segmenters():
        return functools.partial(torchvision.models.get_model_builder(name), weights_backbone=None)
    if name in _detectors():
        return detector_builder(name)
    if name not in known:
        allowed = f"a torchvision model or a dotted path{did_you_mean(name, known)}"
        raise ConfigError("model.name", name, allowed)
    found: Callable[..., Any] = torchvision.models.get_model_builder(name)
    return functools.partial(found, init_weights=False) if name in _INIT_WEIGHTS else found


def _segmenters() -> list[str]:
    """Returns the names of the segmentation models; torchvision fetches weights of their backbones by default."""
    found: list[str] = torchvision.models.list_models(module=torchvision.models.segmentation)
    return found


def _detectors() -> list[str]:
    found: list[str] = torchvision.models.list_models(module=torchvision.models.detection)
    return found


def detector_builder(name: str) -> Callable[..., nn.Module]:
    """Returns the function that builds a detector for `task=detection` (`qatkit.models.detectors`)."""
    from torchvision.models.detection import FasterRCNN

    from qatkit.models.detectors.torchvision_detectors import (
        TorchvisionDetector,
        check_ratios,
        counts_background,
    )
    from qatkit.models.detectors.two_stages import TwoStageDetector

    def build(
        num_classes: int = 90, anchor_ratios: list[float] | None = None, weights: Any = None, **kwargs: Any
    ) -> nn.Module:
        # The weights of RetinaNet and FCOS also have a class for the background, which is never detected.
        classes = num_classes + int(weights is not None or counts_background(name))
        model = torchvision.models.get_model(
            name, weights=weights, weights_backbone=None, num_classes=classes, **kwargs
        )
        if anchor_ratios is not None:
            check_ratios(model, anchor_ratios)
        if isinstance(model, FasterRCNN):
            try:
                return TwoStageDetector(model)
            except ConfigError as error:
                raise ConfigError("model.name", name, reason=error.problem) from error
        return TorchvisionDetector(model, anchor_ratios)

    return build


def _pretrained_detector(
    name: str, weights: WeightsEnum, classes: int | None, kwargs: dict[str, Any]
) -> nn.Module:
    """Returns a detector with torchvision's weights.

    Layers that depend on the number of classes are initialised if the data have another number.
    """
    from qatkit.models.detectors.torchvision_detectors import counts_background

    build, named = detector_builder(name), len(weights.meta["categories"])  # including the background
    trained = build(named - 1, weights=weights, **kwargs)
    if classes in (None, named - int(counts_background(name))):
        return trained
    model, known = build(classes, **kwargs), trained.state_dict()
    own = model.state_dict()
    fitting = {key: value for key, value in known.items() if key in own and own[key].shape == value.shape}
    model.load_state_dict(fitting, strict=False)
    return model


def pretrained(config: ModelConfig, classes: int | None) -> nn.Module:
    """Returns the model with torchvision's weights.

    The head is replaced if `classes` differs from the number of classes of the weights.

    Raises:
        ConfigError: the weights are unknown or cannot be fetched (the message says where to put them), or the
            arguments are wrong.
    """
    weights = _weights(config)
    kwargs = {key: value for key, value in config.kwargs.items() if key != "num_classes"}
    name = Path(weights.url).name
    folder = Path(torch.hub.get_dir(), "checkpoints")
    try:
        if config.name in _detectors():
            return _pretrained_detector(config.name, weights, classes, kwargs)
        model: nn.Module = torchvision.models.get_model(config.name, weights=weights, **kwargs)
    except OSError as error:  # URLError and HTTPError are OSErrors
        reason = f"the weights cannot be fetched ({first_line(error)}); put {name} from {weights.url} into {folder}"
        raise ConfigError("model.weights", config.weights, reason=reason) from error
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = (
            f"the weights cannot be loaded ({first_line(error)}); delete {folder / name} to fetch them again"
        )
        raise ConfigError("model.weights", config.weights, reason=reason) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "model.kwargs", kwargs, f"arguments that {config.name} accepts ({first_line(error)})"
        ) from error
    trained = len(weights.meta["categories"])
    if classes is not None and classes != trained:
        replace_heads(model, trained, classes, every=config.name in _segmenters())
    return model


def arguments(config: ModelConfig) -> dict[str, Any]:
    """Returns the arguments in which the model with `config.weights` differs from one without weights.

    Raises:
        ConfigError: the name or the weights are unknown.
    """
    weights = _weights(config)
    if config.name.startswith("vit_"):  # the positional embedding has this size
        return {"image_size": weights.meta["min_size"][0]}
    return dict(_OF_WEIGHTS.get(config.name, {}))


def classes(config: ModelConfig) -> int:
    """Returns the number of classes of the pretrained weights, without fetching them.

    Raises:
        ConfigError: the name or the weights are unknown.
    """
    return len(_weights(config).meta["categories"])


def preprocessing(config: ModelConfig) -> Preprocessing | None:
    """Returns the preprocessing with which `model.weights` were evaluated; None unless they classify images.

    Raises:
        ConfigError: the name or the weights are unknown.
    """
    transforms: Any = _weights(config).transforms()
    if not hasattr(transforms, "crop_size"):  # not a classification model
        return None
    return Preprocessing(
        image_size=transforms.crop_size[0],
        resize=transforms.resize_size[0],
        mean=tuple(transforms.mean),
        std=tuple(transforms.std),
        interpolation=transforms.interpolation.value,
    )


def _weights(config: ModelConfig) -> WeightsEnum:
    """Returns the member of torchvision's enum that `config.weights` names."""
    builder(config.name)
    members = torchvision.models.get_model_weights(config.name).__members__
    if config.weights not in members:
        names = (
            f"one of {', '.join(members)}"
            if members
            else f"null, since {config.name} has no pretrained weights"
        )
        raise ConfigError("model.weights", config.weights, names)
    found: WeightsEnum = members[config.weights]
    return found


def replace_heads(model: nn.Module, old: int, new: int, *, every: bool = False) -> None:
    """Gives the classifier `new` outputs: replaces the last Linear or Conv2d that has `old` outputs.

    In each auxiliary classifier (GoogLeNet, Inception), the last such layer is replaced too.

    Args:
        model: the model, which is changed in place.
        old, new: the number of outputs before and after.
        every: whether all such layers are replaced, for models that add the outputs of several (LR-ASPP).

    Raises:
        ConfigError: no layer has `old` outputs.
    """
    heads: dict[str, str] = {}  # auxiliary classifier, or "" for the main one: path of its last layer
    for path, module in model.named_modules():
        if _outputs(module) == old:
            top = path.split(".")[0]
            key = top if top.lower().startswith("aux") else ""
            heads[path if every and key in heads else key] = path
    if "" not in heads:
        raise ConfigError(
            "model.num_classes",
            new,
            reason=f"the model has no layer with {old} outputs, the classes of the weights",
        )
    for path in heads.values():
        model.set_submodule(path, _fresh(model.get_submodule(path), new))


def _outputs(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, nn.Conv2d) else None


def _fresh(head: nn.Module, outputs: int) -> nn.Module:
    """Returns a randomly initialised layer like `head` with another number of outputs."""
    if isinstance(head, nn.Linear):
        return nn.Linear(head.in_features, outputs, bias=head.bias is not None)
    assert isinstance(head, nn.Conv2d)
    kernel, stride = head.kernel_size[0], head.stride[0]
    return nn.Conv2d(head.in_channels, outputs, kernel, stride, bias=head.bias is not None)
