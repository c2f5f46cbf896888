"""The float model that a run starts from.

A name without a dot is one of torchvision's, "timm/NAME" one of timm's, a dotted path is a builder of the
user's. Parameters come from
one of three places: nowhere (random), torchvision's pretrained `weights`, or a `checkpoint` file. Pretrained
weights are loaded with the head they were trained with, which is then replaced where the data have another
number of classes; a checkpoint must fit exactly.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import WeightsEnum

from qatkit import timm_models
from qatkit.config.fields import limit_of
from qatkit.config.schema import ModelConfig
from qatkit.data.preprocessing import Preprocessing
from qatkit.errors import ConfigError, near_matches

# Their own initialisation warns that it is slow and about to change; only training from nothing needs it.
_INIT_WEIGHTS = ("googlenet", "inception_v3")


def build(config: ModelConfig, num_classes: int | None = None) -> nn.Module:
    """The float model in eval mode.

    Args:
        config: the model group.
        num_classes: classes of the data; null leaves it to the configuration and the builder.

    Raises:
        ConfigError: an unknown name, unknown weights, weights that cannot be fetched, a checkpoint that does
            not fit or cannot be read, or numbers of classes that disagree.
    """
    if config.weights is not None and config.checkpoint is not None:
        raise ConfigError(
            "model.checkpoint", config.checkpoint, "null when model.weights is given (or null that)"
        )
    classes = _classes(config, num_classes)
    # Read before a model is built: a bad file should fail at once.
    state = None if config.checkpoint is None else read_checkpoint(config.checkpoint)
    if config.weights is not None:
        fetch = timm_models.pretrained if timm_models.is_timm(config) else _pretrained
        model = fetch(config, classes)
    else:
        model = _construct(config, _builder(config.name), classes)
    if state is not None:
        _load(model, state, config)
    return model.eval()


def weights_preprocessing(config: ModelConfig) -> Preprocessing | None:
    """How the images were prepared that the pretrained weights were measured with; null without weights.

    Raises:
        ConfigError: unknown name or weights.
    """
    if config.weights is None:
        return None
    if timm_models.is_timm(config):
        return timm_models.preprocessing(config)
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


def _classes(config: ModelConfig, of_data: int | None) -> int | None:
    """The number of classes that the configuration and the data agree on."""
    given = config.num_classes if config.num_classes is not None else config.kwargs.get("num_classes")
    if given is not None:
        limit_of(ModelConfig, "num_classes").check("model.num_classes", given)
    if given is not None and of_data is not None and given != of_data:
        raise ConfigError("model.num_classes", given, f"null or {of_data}, the number of classes of the data")
    return of_data if given is None else int(given)


def _builder(name: str) -> Callable[..., Any]:
    """The function or class called `name`: torchvision's, "timm/NAME", "package.module.fn" or "package.module:fn"."""
    if name.startswith(timm_models.PREFIX):
        return timm_models.builder(name)
    if "." not in name and ":" not in name:
        known = torchvision.models.list_models(module=torchvision.models)
        if name not in known:
            allowed = f"a torchvision model or a dotted path; did you mean {near_matches(name, known)}?"
            raise ConfigError("model.name", name, allowed)
        builder: Callable[..., Any] = torchvision.models.get_model_builder(name)
        return builder
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        builder = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("model.name", name, f"an importable builder ({error})") from error
    if not callable(builder):
        raise ConfigError("model.name", name, f"a function or class, not {type(builder).__name__}")
    return builder


def _construct(config: ModelConfig, builder: Callable[..., Any], classes: int | None) -> nn.Module:
    """Calls `builder`; the number of classes is passed where it is known and the builder takes it."""
    kwargs = dict(config.kwargs)
    if config.name in _INIT_WEIGHTS:
        kwargs.setdefault("init_weights", False)
    if classes is not None and _accepts_num_classes(builder):
        kwargs["num_classes"] = classes
    try:
        model = builder(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "model.kwargs", kwargs, f"what {config.name} takes ({_first_line(error)})"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError("model.name", config.name, f"must return an nn.Module, not {type(model).__name__}")
    return model


def _accepts_num_classes(builder: Callable[..., Any]) -> bool:
    parameters = inspect.signature(builder).parameters.values()
    return any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)


def _weights(config: ModelConfig) -> WeightsEnum:
    """The member of torchvision's enum that `config.weights` names."""
    if "." in config.name or ":" in config.name:
        allowed = "null for a builder of your own (give model.checkpoint instead)"
        raise ConfigError("model.weights", config.weights, allowed)
    _builder(config.name)
    members = torchvision.models.get_model_weights(config.name).__members__
    if config.weights not in members:
        names = ", ".join(members) or f"null, {config.name} has no pretrained weights"
        raise ConfigError("model.weights", config.weights, names)
    found: WeightsEnum = members[config.weights]
    return found


def _pretrained(config: ModelConfig, classes: int | None) -> nn.Module:
    """The model with torchvision's weights, its head replaced where `classes` is not theirs."""
    weights = _weights(config)
    kwargs = {key: value for key, value in config.kwargs.items() if key != "num_classes"}
    name = Path(weights.url).name
    folder = Path(torch.hub.get_dir(), "checkpoints")
    try:
        model: nn.Module = _builder(config.name)(weights=weights, **kwargs)
    except OSError as error:  # URLError and HTTPError are OSErrors
        reason = f"cannot be fetched ({_first_line(error)}); put {name} from {weights.url} into {folder}"
        raise ConfigError("model.weights", config.weights, reason) from error
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = f"cannot be loaded ({_first_line(error)}); delete {folder / name} to fetch it again"
        raise ConfigError("model.weights", config.weights, reason) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "model.kwargs", kwargs, f"what {config.name} takes ({_first_line(error)})"
        ) from error
    trained = len(weights.meta["categories"])
    if classes is not None and classes != trained:
        replace_heads(model, trained, classes)
    return model


def replace_heads(model: nn.Module, old: int, new: int) -> None:
    """Gives the classifier `new` outputs: the last Linear or Conv2d with `old` outputs is made afresh.

    So is the last one of each auxiliary classifier (GoogLeNet, Inception).

    Raises:
        ConfigError: no layer has `old` outputs.
    """
    heads: dict[str, str] = {}  # auxiliary classifier, or "" for the main one: path of its last layer
    for path, module in model.named_modules():
        if _outputs(module) == old:
            top = path.split(".")[0]
            heads[top if top.lower().startswith("aux") else ""] = path
    if "" not in heads:
        raise ConfigError("model.num_classes", new, f"the model has no layer with the weights' {old} outputs")
    for path in heads.values():
        model.set_submodule(path, _fresh(model.get_submodule(path), new))


def _outputs(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, nn.Conv2d) else None


def _fresh(head: nn.Module, outputs: int) -> nn.Module:
    """A randomly initialised layer like `head` with another number of outputs."""
    if isinstance(head, nn.Linear):
        return nn.Linear(head.in_features, outputs, bias=head.bias is not None)
    assert isinstance(head, nn.Conv2d)
    kernel, stride = head.kernel_size[0], head.stride[0]
    return nn.Conv2d(head.in_channels, outputs, kernel, stride, bias=head.bias is not None)


def read_checkpoint(path: str) -> dict[str, Tensor]:
    """The float `state_dict` in a file: plain, or under "state_dict" (Lightning) or "model" (torchvision).

    A prefix "module." or "model." that all keys share is taken off.

    Raises:
        ConfigError: the file is missing, damaged, holds code, or holds no `state_dict`.
    """
    content = _unpickle(path)
    if isinstance(content, Mapping):
        content = next((content[key] for key in ("state_dict", "model") if key in content), content)
    tensors = isinstance(content, Mapping) and all(isinstance(value, Tensor) for value in content.values())
    if not tensors or not content:
        raise ConfigError(
            "model.checkpoint", path, "a file with a state_dict, plain or under state_dict or model"
        )
    state = {str(key): value for key, value in content.items()}
    for prefix in ("module.", "model."):
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _unpickle(path: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError("model.checkpoint", path, "an existing file")
    try:
        # torch.load does not compare the archive's checksums: flipped bits would load as weights.
        if zipfile.is_zipfile(path) and (member := zipfile.ZipFile(path).testzip()) is not None:
            raise ConfigError("model.checkpoint", path, f"an undamaged file ({member} fails its checksum)")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the pickle protocol of a file that is refused anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = _refused_global(str(error))
        allowed = (
            f"a state_dict; the file {reason}"
            if reason
            else "a file written by torch.save; this one is damaged"
        )
        raise ConfigError("model.checkpoint", path, allowed) from error
    except (RuntimeError, EOFError, OSError, zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        allowed = f"a file written by torch.save; this one is damaged ({_first_line(error)[:100]})"
        raise ConfigError("model.checkpoint", path, allowed) from error


def _refused_global(message: str) -> str | None:
    """What code torch refused to run, from its message; null when the file is merely no checkpoint."""
    for marker in ("unsupported GLOBAL ", "Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in message:
            return f"holds pickled code ({message.split(marker)[1].split()[0]}) and is refused"
    return None


def _load(model: nn.Module, state: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Loads `state`, after a comparison that says in one line what does not fit."""
    own = model.state_dict()
    parts = []
    for what, keys in (("missing", own.keys() - state.keys()), ("unexpected", state.keys() - own.keys())):
        if keys:
            first = next(key for key in (*own, *state) if key in keys)
            parts.append(f"{what} {first}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else ""))
    wrong = [key for key in own if key in state and own[key].shape != state[key].shape]
    if wrong:
        key = wrong[0]
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        parts.append(f"shape of {key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}{more}")
    if parts:
        raise ConfigError(
            "model.checkpoint", config.checkpoint, f"a checkpoint of {config.name}; {', '.join(parts)}"
        )
    model.load_state_dict(dict(state))


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
