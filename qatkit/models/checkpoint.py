"""Float checkpoints: read with every failure as one line, and loaded with what does not fit named."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qatkit.config.schema import ModelConfig
from qatkit.errors import ConfigError, first_line


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
        allowed = f"a file written by torch.save; this one is damaged ({first_line(error)[:100]})"
        raise ConfigError("model.checkpoint", path, allowed) from error


def _refused_global(message: str) -> str | None:
    """What code torch refused to run, from its message; null when the file is merely no checkpoint."""
    for marker in ("unsupported GLOBAL ", "Unsupported global: GLOBAL ", "Unsupported class "):
        if marker in message:
            return f"holds pickled code ({message.split(marker)[1].split()[0]}) and is refused"
    return None


def load(model: nn.Module, state: Mapping[str, Tensor], config: ModelConfig) -> None:
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
