"""Checks on resume, by digests of their weights, that the float models of a run are still the same.

    last.ckpt: a digest of each ── the run continues ── the same? ─ no ─> refused
                                                                  └ yes ─> teacher, float file, control, accuracy drop

The trained weights are in the checkpoints. The teacher, the reference for the accuracy and the start of a
control are read from a file again. By then, it may have been overwritten, or the configuration may name another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qatkit.config.schema import Config
from qatkit_verify.errors import ConfigError

_FLOAT, _TEACHER = "float", "teacher"


def digests(config: Config, model: nn.Module, teacher: nn.Module | None) -> dict[str, str]:
    """Returns the digests of the float models, without that of a model that the run trains itself.

    Args:
        model: the float model as it was built.
        teacher: the teacher; None if the model itself is the teacher, or if there is none.
    """
    found = {} if config.schedule.float_epochs else {_FLOAT: _digest(model)}
    return found if teacher is None else {**found, _TEACHER: _digest(teacher)}


def check_same(
    config: Config, folder: Path, found: Mapping[str, str], known: Mapping[str, Any] | None
) -> None:
    """Checks that a resumed run has the float models that it began with.

    Args:
        known: the entries of the run's checkpoint (`Run.stored`).

    Raises:
        ConfigError: the weights of a float model differ.
    """
    if config.resume is None or known is None:
        return
    schedule = config.schedule
    of_teacher = ("schedule.distill_checkpoint", schedule.distill_checkpoint)
    if schedule.distill_checkpoint is None:
        of_teacher = ("schedule.distill_teacher", schedule.distill_teacher)
    for name, (key, value) in {
        _FLOAT: ("model.checkpoint", config.model.checkpoint),
        _TEACHER: of_teacher,
    }.items():
        if name in found and known.get(name, found[name]) != found[name]:
            allowed = (
                f"the weights that the run in {folder} began with, as teacher or float reference; these weights are"
                " different (resume=null starts again)"
            )
            raise ConfigError(key, value, allowed)


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
