"""Float checkpoints: the content of the file, the part of it that the model takes, and errors about misfits.

    file ── read ──> its state_dicts by name: "", "state_dict", "model", "model_ema", ...
                       └─ the trained one, or the one that is asked for ── load ──> keys below one prefix ──> model

A prefix is found by the model's own keys: that of DataParallel ("module."), Lightning ("model.", "net.", ...) or SWA;
torch.compile's ("_orig_mod.") may be anywhere. Anything else (weights of a loss, an average, counters) is
left out and reported.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from qatkit.config.schema import ModelConfig
from qatkit.encryption.vault import readable
from qatkit_verify.errors import ConfigError, did_you_mean, first_line

State = Mapping[str, Tensor]
# Where training scripts put the weights, the trained ones before averages of them.
_TRAINED = (
    "state_dict",
    "model",
    "model_state_dict",
    "model_state",
    "net",
    "network",
    "module",
    "params",
    "weights",
)
_AVERAGES = ("state_dict_ema", "model_ema", "ema_state_dict", "params_ema", "ema")
_COMPILED = "_orig_mod."
_COUNTER = "num_batches_tracked"  # files of old versions of torch have none
_DEEPEST = 2  # names in a prefix: deeper keys belong to a part of another model
_TRIED = 8  # number of the model's keys with which a prefix is searched for
_SCALAR: Any = importlib.import_module("numpy._core.multiarray").scalar
# Plain data without code that files of torchvision's, timm's and other scripts hold in addition to tensors.
_PLAIN = [
    argparse.Namespace,
    pathlib.PosixPath,
    np.dtype,
    _SCALAR,
    (_SCALAR, "numpy.core.multiarray.scalar"),  # as NumPy 1 called it
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64, np.int32, np.bool_)),
]


@dataclass(frozen=True)
class Checkpoint:
    """The state_dicts of a file; "" is the name of one that is the file itself."""

    path: str
    states: Mapping[str, State]

    def chosen(self, key: str | None) -> tuple[str, State]:
        """Returns the state_dict called `key`; None: the trained one, or an average if there is nothing else.

        Raises:
            ConfigError: there is no such state_dict.
        """
        if key is None:
            name = next(iter(self.states))
        elif key in self.states:
            name = key
        else:
            allowed = (
                f"null, or one of those in {self.path}: {', '.join(filter(None, self.states)) or 'none'}"
            )
            raise ConfigError("model.checkpoint_key", key, allowed)
        return name, self.states[name]


def read_checkpoint(path: str) -> Checkpoint:
    """Returns the content of a file of `torch.save` or safetensors.

    Raises:
        ConfigError: the file is missing, damaged, holds code, or holds no `state_dict`.
    """
    if not pathlib.Path(path).is_file():
        raise ConfigError("model.checkpoint", path, "an existing file")
    with readable(path) as plain:
        content = _safetensors(path, plain) if path.endswith(".safetensors") else _unpickle(path, plain)
    if _is_state(content):
        return Checkpoint(path, {"": content})
    entries = content if isinstance(content, Mapping) else {}
    named = ((key, entries.get(key)) for key in (*_TRAINED, *_AVERAGES))
    found = {key: state for key, state in named if _is_state(state)}
    if not found:
        known = ", ".join(_TRAINED[:3])
        holds = ", ".join(map(str, islice(entries, 5))) or type(content).__name__
        raise ConfigError(
            "model.checkpoint",
            path,
            f"a file with a state_dict, plain or under {known}, ...; this one holds {holds}",
        )
    return Checkpoint(path, found)


def _is_state(content: Any) -> TypeGuard[State]:
    """Returns whether `content` is a mapping of names to tensors and nothing else."""
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items())
    )


def _safetensors(path: str, plain: pathlib.Path) -> State:
    try:
        return safetensors.torch.load_file(plain)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        allowed = f"a safetensors file; this one is damaged ({first_line(error)[:100]})"
        raise ConfigError("model.checkpoint", path, allowed) from error


def _unpickle(path: str, plain: pathlib.Path) -> Any:
    try:
        # torch.load does not compare the archive's checksums: flipped bits would load as weights.
        if zipfile.is_zipfile(plain) and (member := zipfile.ZipFile(plain).testzip()) is not None:
            raise ConfigError("model.checkpoint", path, f"an undamaged file ({member} fails its checksum)")
        with warnings.catch_warnings(), torch.serialization.safe_globals(_PLAIN):
            warnings.simplefilter("ignore")  # on the pickle protocol of a file that is rejected anyway
            return torch.load(plain, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = _refused_global(str(error))
        allowed = (
            f"a state_dict; the file {reason}"
            if reason
            else "a file written by torch.save; this one is damaged"
        )
        raise ConfigError("model.checkpoint", path, allowed) from error
    except ConfigError:
        raise
    except Exception as error:  # damaged bytes may raise anything in torch's reader
        allowed = f"a file written by torch.save; this one is damaged ({first_line(error)[:100]})"
        raise ConfigError("model.checkpoint", path, allowed) from error


def _refused_global(message: str) -> str | None:
    """Returns a note on code that torch refused to run, from its message; None if the file is just no checkpoint."""
    for marker in ("unsupported GLOBAL ", "Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in message:
            return f"holds pickled code ({message.split(marker)[1].split()[0]}) and is refused"
    return None


def load(model: nn.Module, checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Loads the chosen state_dict, and reports what was taken from a file that holds more.

    Raises:
        ConfigError: keys do not fit (the first of each kind is named), or no trained model has such values.
    """
    name, stored = checkpoint.chosen(config.checkpoint_key)
    own = model.state_dict()
    prefix, state, beside = _below_prefix(stored, own)
    counters = {key: value for key, value in own.items() if key.endswith(_COUNTER) and key not in state}
    parts = _misfits(own, {**state, **counters})
    if parts:
        raise ConfigError(
            "model.checkpoint", checkpoint.path, f"a checkpoint of {config.name}; {', '.join(parts)}"
        )
    _check_values(checkpoint.path, state)
    model.load_state_dict({**state, **counters})
    others = [key for key in checkpoint.states if key != name]
    said = [f"'{name}' was taken, not {', '.join(others)} (model.checkpoint_key)"] if others else []
    if beside:
        said.append(f"without what is not below '{prefix}': {_first(beside)}")
    kinds = {str(v.dtype).removeprefix("torch.") for v in state.values() if v.is_floating_point()} - {
        "float32"
    }
    if kinds:
        said.append(f"{', '.join(sorted(kinds))} as float32")
    if said:
        warnings.warn(f"model.checkpoint={checkpoint.path}: {'; '.join(said)}", stacklevel=2)


def _below_prefix(stored: State, own: Mapping[str, Any]) -> tuple[str, dict[str, Tensor], list[str]]:
    """Returns the prefix below which most of the model's keys are, the state there, and the other keys."""
    plain = {key.replace(_COMPILED, ""): value for key, value in stored.items()}
    prefixes = {""}
    for wanted in islice(own, _TRIED):
        found = (key.removesuffix(wanted) for key in plain if key.endswith(f".{wanted}"))
        prefixes |= {prefix for prefix in found if prefix.count(".") <= _DEEPEST}
    best = max(sorted(prefixes, key=len), key=lambda prefix: sum(prefix + key in plain for key in own))
    below = {key.removeprefix(best): value for key, value in plain.items() if key.startswith(best)}
    return best, below, [key for key in plain if not key.startswith(best)]


def _misfits(own: Mapping[str, Tensor], state: State) -> list[str]:
    """Returns descriptions of what does not fit."""
    parts = []
    missing, unexpected = ([k for k in a if k not in b] for a, b in ((own, state), (state, own)))
    if missing:
        parts.append(f"missing {_first(missing)}{did_you_mean(missing[0], unexpected, 3)}")
    if unexpected:
        parts.append(f"unexpected {_first(unexpected)}")
    wrong = [key for key in own if key in state and own[key].shape != state[key].shape]
    if wrong:
        key, more = wrong[0], f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        parts.append(f"shape of {key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}{more}")
    return parts


def _first(keys: Iterable[str]) -> str:
    every = list(keys)
    return every[0] + (f" and {len(every) - 1} more" if len(every) > 1 else "")


def _check_values(path: str, state: State) -> None:
    """Checks for values that torch would accept silently or reject with an unhelpful message.

    Raises:
        ConfigError: a tensor has no values, no plain layout and number type, or values that are not finite.
    """
    for key, value in state.items():
        kind = str(value.dtype).removeprefix("torch.")
        if value.is_meta or value.layout != torch.strided or value.is_quantized or value.is_complex():
            what = "meta" if value.is_meta else "sparse" if value.layout != torch.strided else kind
            raise ConfigError("model.checkpoint", path, f"plain float tensors; {key} is {what}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ConfigError("model.checkpoint", path, f"finite numbers; {key} holds NaN or infinity")
        if key.endswith("running_var") and bool((value < 0).any()):
            raise ConfigError(
                "model.checkpoint", path, f"variances of 0 and more; {key} holds {float(value.min()):.3g}"
            )
