"""A run: its configuration, its folder, its messages, and the checkpoints that it can continue from."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from qatkit.config.compose import save_config
from qatkit.config.schema import Config
from qatkit.encryption.cipher import KEY_SETTING, is_encrypted
from qatkit.encryption.sealed import damage
from qatkit.encryption.vault import encrypted_copy, key_file_held, key_held, readable
from qatkit.records.plan import NextStep, Planned
from qatkit.records.run_files import (
    CHECKPOINT_FILE,
    CLIMB_FILE,
    CONFIG_FILE,
    REPORT_FILE,
    STAGE_CHECKPOINTS,
    file_name,
    last_checkpoint,
)
from qatkit.run.find import find_resume, output_dir
from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.placement.record import Placed

_LARGEST_SIZE = 2**20  # pixels or classes: larger numbers come from a damaged file


@dataclass
class Run:
    """A run: its configuration, its folder, and what its stages have found so far.

    Attributes:
        config: the configuration, with the changes that a placement or the calibration has made to it.
        folder: the folder of the run.
        seconds: the duration of each finished stage.
        notes: notes for the report on the configuration and on the checkpoint that the run continues from.
        asked: the configuration as it was given, if `config` differs from it; it is written to config.yaml and
            the report.
        placed: the placement, if there is one.
        curves: the results of the epochs, for each training stage (`qatkit.train.learner.Learner.curve`).
        speeds: the times per sample of the first exported file (`qatkit.run.pace.of_first_file`).
        plan: the stages of the run, announced at its start.
        next: suggestions of what the user may do after the run.
    """

    config: Config
    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    asked: Config | None = None
    placed: Placed | None = None
    curves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    speeds: Mapping[str, Any] = field(default_factory=dict)
    plan: tuple[Planned, ...] = ()
    next: tuple[NextStep, ...] = ()

    @cached_property
    def scratch(self) -> Path:
        """A temporary folder for files that later stages use; it is removed at the end of the run."""
        self._temporary = tempfile.TemporaryDirectory(prefix="qatkit-")
        return Path(self._temporary.name)

    @property
    def files(self) -> Path:
        """The folder of the ONNX files; with an encryption key it is in memory, and `keep` stores the files."""
        return self.folder if key_held() is None else self.scratch

    @property
    def int8_name(self) -> str:
        """The name of the INT8 file."""
        return file_name(self.config.mode)

    def stored(self) -> Mapping[str, Any] | None:
        """Returns the run's entries in its checkpoint; None while there is no checkpoint.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        path = self.folder / CHECKPOINT_FILE
        if not path.is_file():
            return None
        found: dict[str, Any] = read_checkpoint(str(path), "resume")["qatkit"]
        return found

    def keep(self, names: Iterable[str]) -> None:
        """Encrypts the files among `names` that are in memory, and writes them into the run's folder."""
        for plain in (self.files / name for name in names if self.files != self.folder):
            if plain.is_file():
                encrypted_copy(plain, self.folder / plain.name)

    @contextmanager
    def stage(self, name: str, title: str = "") -> Iterator[None]:
        """Times a stage and prints its title. The run may be stopped safely at the end of the stage."""
        if title:
            say(title)
        start = time.monotonic()
        try:
            yield
            stopping.check()
        except stopping.Stopped as stop:
            stop.where = stop.where or f"in {name.replace('_', ' ')}"
            raise
        self.seconds[name] = round(time.monotonic() - start, 2)


def folder_of(config: Config) -> Path:
    """Returns the run's folder, either a new one or that of a run to resume. Nothing is written yet.

    Raises:
        ConfigError: `resume` names no checkpoint of a run, or one outside of `output_dir`; a checkpoint to resume
            from is damaged; or the folder holds another run.
    """
    if config.resume == "auto":
        found = find_resume(config)
        if found:
            say(f"resuming {found[0]}")
            return _checked(found[0])
        say("resume=auto: no unfinished run of this configuration, starting a new one")
    elif config.resume is not None:
        if Path(config.resume).name not in STAGE_CHECKPOINTS:
            raise ConfigError(
                "resume", config.resume, f"one of {', '.join(STAGE_CHECKPOINTS)} in a run's folder"
            )
        there = Path(config.resume).parent
        if config.output_dir is not None and Path(config.output_dir).resolve() != there.resolve():
            allowed = f"null or {there} with resume={config.resume}, since a run continues in its own folder"
            raise ConfigError("output_dir", config.output_dir, allowed)
        return _checked(there)
    folder = output_dir(config)
    if not main_process():
        return folder  # the first process has opened it
    if any((folder / name).exists() for name in (REPORT_FILE, CLIMB_FILE)) or list(folder.glob("*.ckpt")):
        reason = (
            "the folder holds another run; choose another folder (resume=auto continues an "
            "unfinished run of the same configuration)"
        )
        raise ConfigError("output_dir", folder, reason=reason)
    return folder


def _checked(folder: Path) -> Path:
    """Reads every checkpoint in `folder`, since a damaged one would fail only in its stage; returns `folder`."""
    for path in (folder / name for name in STAGE_CHECKPOINTS):
        if path.is_file():
            if key_held() is not None and not is_encrypted(path):
                allowed = f"null, since {path} was written without encryption"
                raise ConfigError(KEY_SETTING, key_file_held(), allowed)
            read_checkpoint(str(path), "resume")
    return folder


def check_images(config: Config, folder: Path, fingerprint: str) -> None:
    """Checks that a resumed run trains on the images that it began with; their paths may have changed.

    Args:
        fingerprint: the fingerprint of the images (`DataModule.fingerprint`).

    Raises:
        ConfigError: the images differ.
    """
    found = last_checkpoint(folder) if config.resume is not None else None
    state = {} if found is None else read_checkpoint(str(found), "resume").get("DataModule", {})
    if state.get("fingerprint", fingerprint) != fingerprint:
        key, value = ("root", config.data.root) if config.data.root else ("source", config.data.source)
        allowed = f"the same training data, labels and order that the run in {folder} began with"
        raise ConfigError(f"data.{key}", value, f"{allowed} (resume=null starts again)")


def open_folder(run: Run) -> None:
    """Creates the run's folder and writes the configuration into it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    if main_process():
        save_config(run.asked or run.config, run.folder / CONFIG_FILE)


def read_checkpoint(path: str, key: str = "checkpoint") -> dict[str, Any]:
    """Reads a checkpoint of `train`, tensors only.

    Raises:
        ConfigError: the file is no checkpoint of `train`, is damaged, or contains code.
    """
    damaged = "the file is damaged, or is no checkpoint of train.py"
    with readable(path) as plain:
        try:
            found = damage(plain)
            stored = None if found else torch.load(plain, map_location="cpu", weights_only=True)
        except Exception as error:  # an error of the disk, or of torch's reader for arbitrary bytes
            raise ConfigError(key, path, reason=f"{damaged} ({first_line(error)[:160]})") from error
    if found:
        raise ConfigError(key, path, reason=f"{damaged} ({found})")
    if not isinstance(stored, dict) or not _describes_a_run(stored):
        raise ConfigError(key, path, "a checkpoint of train.py")
    return stored


def _describes_a_run(stored: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint has the required entries: image shape, classes, and Lightning's progress."""
    about, weights = stored.get("qatkit"), stored.get("state_dict")
    if not isinstance(about, dict) or not isinstance(weights, dict) or "loops" not in stored:
        return False
    sizes, classes = about.get("input_shape", [1, 1, 1]), about.get("num_classes")
    if not isinstance(sizes, list) or len(sizes) not in (1, 3):  # samples, or channels and two axes
        return False
    numbers = [*sizes, 1 if classes is None else classes]
    return all(type(one) is int and 0 < one < _LARGEST_SIZE for one in numbers)


def main_process() -> bool:
    """Returns whether this is rank 0, the only process that writes files and messages."""
    return getattr(rank_zero_only, "rank", 0) == 0


def say(text: str) -> None:
    """Prints a progress line, from rank 0 only."""
    if main_process():
        print(text, file=sys.stderr, flush=True)
