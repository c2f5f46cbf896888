"""Warns if the float weights are an average over steps (`schedule.ema`) and the fine-tuning keeps no average.

Such a fine-tuning ends with the weights of a single step, which are often worse (decision 65).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qatkit.config.compose import load_config
from qatkit.config.schema import Config
from qatkit.encryption.vault import readable
from qatkit.records.run_files import CONFIG_FILE, FLOAT_CHECKPOINT
from qatkit.train.learner import EMA
from qatkit.warning import warn
from qatkit_verify.errors import ConfigError


def warn_of_average(config: Config) -> None:
    """Warns if the checkpoint's float training kept an average of its weights and the fine-tuning does not."""
    path, schedule = config.model.checkpoint, config.schedule
    if path is None or schedule.epochs < 1 or schedule.ema is not None or config.verify.every:
        return  # verify.every keeps the best epoch, where the start counts as one
    decay = decay_of(Path(path))
    if decay:
        warn(
            f"model.checkpoint={path}: the float weights are an average over steps (schedule.ema={decay:g}), but this"
            f" fine-tuning ends with the weights of its last step; add schedule.ema={decay:g} to average them too",
        )


def decay_of(path: Path) -> float | None:
    """Returns the decay of the averaged weights in a finished float.ckpt, or None for weights of a single step.

    Checkpoints of earlier versions do not store the decay; it is then read from the configuration in the same
    folder.
    """
    stored = _stored(path)
    about = stored.get("qatkit")
    if not stored.get("finished") or not isinstance(about, Mapping):
        return None
    decay = about.get(EMA)
    if decay is None and path.name == FLOAT_CHECKPOINT:
        decay = _configured(path.with_name(CONFIG_FILE))
    return decay if isinstance(decay, float) else None


def _stored(path: Path) -> Mapping[str, Any]:
    """Returns the contents of a checkpoint without reading its tensors; empty if torch.load refuses the file."""
    if path.suffix != ".ckpt":
        return {}
    try:
        with readable(path) as plain:
            found = torch.load(plain, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # an error in the file is reported when the model is loaded
        return {}
    return found if isinstance(found, Mapping) else {}


def _configured(file: Path) -> float | None:
    try:
        schedule = load_config(file).schedule
    except (ConfigError, OSError):
        return None
    return schedule.ema if schedule.float_epochs else None
