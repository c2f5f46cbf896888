"""Float checkpoints: how a file is read, which part of it the model loads, and errors if it does not fit.

    file ── read ──> its state_dicts by name: "", "state_dict", "model", "model_ema", ...
                       └─ the trained one, or the chosen one ── load ──> keys below one prefix ──> model

The prefix is found with the model's own keys. It may come from DataParallel ("module."), Lightning ("model.",
"net.", ...) or SWA. torch.compile's "_orig_mod." may be anywhere in a key. Anything else (weights of a loss,
an average, counters) is left out and reported.
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
from qatkit.warning import warn
from qatkit_verify.errors import ConfigError, did_you_mean, first_line

State = Mapping[str, Tensor]
# Keys under which training scripts store weights: trained weights come before their averages.
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
_COUNTER = "num_batches_tracked"  # missing in files of old versions of torch
_DEEPEST = 2  # maximum number of names in a prefix: deeper keys belong to a part of another model
_TRIED = 8  # number of the model's keys that are used to find the prefix
_SCALAR: Any = importlib.import_module("numpy._core.multiarray").scalar
# Types of plain data without code that files of torchvision, timm and other training scripts may contain.
_PLAIN = [
    argparse.Namespace,
    pathlib.PosixPath,
    np.dtype,
    _SCALAR,
    (_SCALAR, "numpy.core.multiarray.scalar"),  # its name in NumPy 1
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64, np.int32, np.bool_)),
]


@dataclass(frozen=True)
class Checkpoint:
    """The state_dicts of a file by name; the name is "" if the file itself is a state_dict."""

    path: str
    states: Mapping[str, State]

    def chosen(self, key: str | None) -> tuple[str, State]:
        """Returns the name and the state_dict for `key`.

        None selects the trained weights, or an average of them if the file has only averages.

        Raises:
            ConfigError: there is no such state_dict.
        """
        if key is None:
            name = next(iter(self.states))
        elif key in self.states:
            name = key
        else:
            names = ", ".join(filter(None, self.states))
            allowed = f"null or one of the state_dicts in {self.path} ({names})" if names else "null"
            plain = "" if names else f", since {self.path} is a plain state_dict"
            raise ConfigError("model.checkpoint_key", key, allowed + plain)
        return name, self.states[name]


def read_checkpoint(path: str) -> Checkpoint:
    """Returns the contents of a file written by `torch.save` or safetensors.

    Raises:
        ConfigError: the file is missing or damaged, or contains code or no `state_dict`.
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
            f"a file with a state_dict, plain or under {known}, ...; the file contains {holds}",
        )
    return Checkpoint(path, found)


def _is_state(content: Any) -> TypeGuard[State]:
    """Returns whether `content` is a non-empty mapping from names to tensors."""
    return (
        isinstance(content, Mapping)
        and bool(content)
        and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items())
    )


def _safetensors(path: str, plain: pathlib.Path) -> State:
    try:
        return safetensors.torch.load_file(plain)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        reason = f"the file is damaged or not a safetensors file ({first_line(error)[:100]})"
        raise ConfigError("model.checkpoint", path, reason=reason) from error


def _unpickle(path: str, plain: pathlib.Path) -> Any:
    try:
        # torch.load does not compare the archive's checksums: flipped bits would load as weights.
        if zipfile.is_zipfile(plain) and (member := zipfile.ZipFile(plain).testzip()) is not None:
            reason = f"the file is damaged ({member} fails its checksum); copy or download it again"
            raise ConfigError("model.checkpoint", path, reason=reason)
        with warnings.catch_warnings(), torch.serialization.safe_globals(_PLAIN):
            warnings.simplefilter(
                "ignore"
            )  # torch warns about the pickle protocol of files that are rejected anyway
            return torch.load(plain, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = _refused_global(str(error))
        reason = (
            f"the file contains pickled code ({code}), which is never run; save only the model's state_dict"
            if code
            else "the file is damaged or was not written by torch.save"
        )
        raise ConfigError("model.checkpoint", path, reason=reason) from error
    except ConfigError:
        raise
    except Exception as error:  # damaged bytes may raise anything in torch's reader
        reason = f"the file is damaged or was not written by torch.save ({first_line(error)[:100]})"
        raise ConfigError("model.checkpoint", path, reason=reason) from error


def _refused_global(message: str) -> str | None:
    """Returns the name of the code that torch refused to run, from its error message; None if this names none."""
    for marker in ("unsupported GLOBAL ", "Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in message:
            return message.split(marker)[1].split()[0]
    return None


def load(model: nn.Module, checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Loads the chosen state_dict, and warns about parts of the file that were not loaded.

    Raises:
        ConfigError: the chosen state_dict does not exist, its keys or shapes do not fit (the message names the
            first of each kind), or values are impossible for a trained model.
    """
    name, stored = checkpoint.chosen(config.checkpoint_key)
    own = model.state_dict()
    prefix, state, outside = _below_prefix(stored, own)
    counters = {key: value for key, value in own.items() if key.endswith(_COUNTER) and key not in state}
    parts = _misfits(own, {**state, **counters})
    if parts:
        raise ConfigError(
            "model.checkpoint", checkpoint.path, f"a checkpoint of {config.name}; {'; '.join(parts)}"
        )
    _check_values(checkpoint.path, state)
    model.load_state_dict({**state, **counters})
    others = [key for key in checkpoint.states if key != name]
    said = [f"'{name}' was loaded, not {', '.join(others)} (see model.checkpoint_key)"] if others else []
    if outside:
        said.append(f"keys outside of '{prefix}' were left out: {_first(outside)}")
    kinds = {str(v.dtype).removeprefix("torch.") for v in state.values() if v.is_floating_point()} - {
        "float32"
    }
    if kinds:
        said.append(f"{' and '.join(sorted(kinds))} values were converted to float32")
    if said:
        warn(f"model.checkpoint={checkpoint.path}: {'; '.join(said)}")


def _below_prefix(stored: State, own: Mapping[str, Any]) -> tuple[str, dict[str, Tensor], list[str]]:
    """Returns the prefix of most of the model's keys, the state below it, and the other keys."""
    plain = {key.replace(_COMPILED, ""): value for key, value in stored.items()}
    prefixes = {""}
    for wanted in islice(own, _TRIED):
        found = (key.removesuffix(wanted) for key in plain if key.endswith(f".{wanted}"))
        prefixes |= {prefix for prefix in found if prefix.count(".") <= _DEEPEST}
    best = max(sorted(prefixes, key=len), key=lambda prefix: sum(prefix + key in plain for key in own))
    below = {key.removeprefix(best): value for key, value in plain.items() if key.startswith(best)}
    return best, below, [key for key in plain if not key.startswith(best)]


def _misfits(own: Mapping[str, Tensor], state: State) -> list[str]:
    """Returns clauses that describe what does not fit."""
    parts = []
    missing, unexpected = ([k for k in a if k not in b] for a, b in ((own, state), (state, own)))
    if missing:
        parts.append(f"the file lacks {_first(missing)}{did_you_mean(missing[0], unexpected, 3)}")
    if unexpected:
        parts.append(f"the file has the unexpected {_first(unexpected)}")
    wrong = [key for key in own if key in state and own[key].shape != state[key].shape]
    if wrong:
        key, more = wrong[0], f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        told = f"{tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        parts.append(f"{key}{more} {'have' if more else 'has'} another shape ({told})")
    return parts


def _first(keys: Iterable[str]) -> str:
    every = list(keys)
    return every[0] + (f" and {len(every) - 1} more" if len(every) > 1 else "")


def _check_values(path: str, state: State) -> None:
    """Checks for values that torch would accept silently or reject with an unhelpful message.

    Raises:
        ConfigError: a tensor has no values, is not of a plain layout and number type, has values that are not
            finite, or has variances below 0.
    """
    for key, value in state.items():
        kind = str(value.dtype).removeprefix("torch.")
        if value.is_meta or value.layout != torch.strided or value.is_quantized or value.is_complex():
            what = "meta" if value.is_meta else "sparse" if value.layout != torch.strided else kind
            reason = f"{key} is a {what} tensor; only plain real numbers can be loaded"
            raise ConfigError("model.checkpoint", path, reason=reason)
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ConfigError("model.checkpoint", path, reason=f"{key} contains NaN or infinity")
        if key.endswith("running_var") and bool((value < 0).any()):
            reason = f"{key} contains the variance {float(value.min()):.3g}, which is below 0"
            raise ConfigError("model.checkpoint", path, reason=reason)
