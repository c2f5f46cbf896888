"""A run: its configuration, its folder, what it says on the way, and the checkpoints that it can go on from."""

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

_LARGEST_SIZE = 2**20  # pixels or classes: more are no model's, but a damaged file's


@dataclass
class Run:
    """A configuration, its folder, how long each stage took, and what there is to say of where it goes on from.

    Attributes:
        config: with the overrides of a placement.
        asked: the configuration as it was given, where that is another; config.yaml and the report have this one.
        placed: the placement, of a run that has one.
        curves: of each stage that trained, what was found of its epochs (`qatkit.train.learner.Learner.curve`).
    """

    config: Config
    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    asked: Config | None = None
    placed: Placed | None = None
    curves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @cached_property
    def scratch(self) -> Path:
        """A folder for files that one stage makes and the next may take; it goes with the run."""
        self._temporary = tempfile.TemporaryDirectory(prefix="qatkit-")
        return Path(self._temporary.name)

    @property
    def files(self) -> Path:
        """Where the ONNX files are while the run is at work: in its folder, or with a key in memory until `keep`."""
        return self.folder if key_held() is None else self.scratch

    @property
    def int8_name(self) -> str:
        """The name of the INT8 file that is made of a module."""
        return file_name(self.config.mode)

    def stored(self) -> Mapping[str, Any] | None:
        """Returns what the run's checkpoint says of it; None while there is no checkpoint.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        path = self.folder / CHECKPOINT_FILE
        if not path.is_file():
            return None
        found: dict[str, Any] = read_checkpoint(str(path), "resume")["qatkit"]
        return found

    def keep(self, names: Iterable[str]) -> None:
        """Brings those of `names` that are in memory into the folder, encrypted."""
        for plain in (self.files / name for name in names if self.files != self.folder):
            if plain.is_file():
                encrypted_copy(plain, self.folder / plain.name)

    @contextmanager
    def stage(self, name: str, title: str = "") -> Iterator[None]:
        """Times a stage and says what is being waited for; its end is a safe point."""
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
    """The run's folder, new or to be continued. Nothing is written yet."""
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
            allowed = f"null or {there} with resume={config.resume}: a run goes on in its own folder"
            raise ConfigError("output_dir", config.output_dir, allowed)
        return _checked(there)
    folder = output_dir(config)
    if not main_process():
        return folder  # which the first process has opened
    if any((folder / name).exists() for name in (REPORT_FILE, CLIMB_FILE)) or list(folder.glob("*.ckpt")):
        reason = "the folder holds another run; choose another folder (resume=auto continues an unfinished, equal run)"
        raise ConfigError("output_dir", folder, reason=reason)
    return folder


def _checked(folder: Path) -> Path:
    """`folder`, once every checkpoint in it has been read: a damaged one would show only in its stage."""
    for path in (folder / name for name in STAGE_CHECKPOINTS):
        if path.is_file():
            if key_held() is not None and not is_encrypted(path):
                allowed = f"null: {path} was written without it, and is in the clear"
                raise ConfigError(KEY_SETTING, key_file_held(), allowed)
            read_checkpoint(str(path), "resume")
    return folder


def check_images(config: Config, folder: Path, fingerprint: str) -> None:
    """A run that goes on trains on the images that it began with (`DataModule.fingerprint`), wherever they lie now.

    Raises:
        ConfigError: they are others.
    """
    found = last_checkpoint(folder) if config.resume is not None else None
    state = {} if found is None else read_checkpoint(str(found), "resume").get("DataModule", {})
    if state.get("fingerprint", fingerprint) != fingerprint:
        key, value = ("root", config.data.root) if config.data.root else ("source", config.data.source)
        allowed = (
            f"the training images, with their labels and in their order, that the run in {folder} began with"
        )
        raise ConfigError(f"data.{key}", value, f"{allowed}; resume=null starts again")


def open_folder(run: Run) -> None:
    """Makes the run's folder, with its configuration in it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    if main_process():
        save_config(run.asked or run.config, run.folder / CONFIG_FILE)


def read_checkpoint(path: str, key: str = "checkpoint") -> dict[str, Any]:
    """A checkpoint of `train`, tensors only.

    Raises:
        ConfigError: a file that is no such checkpoint, is damaged, or holds code.
    """
    allowed = "an undamaged checkpoint of train.py"
    with readable(path) as plain:
        try:
            found = damage(plain)
            stored = None if found else torch.load(plain, map_location="cpu", weights_only=True)
        except Exception as error:  # of the disk, and whatever bytes make of torch's reader
            raise ConfigError(key, path, f"{allowed} ({first_line(error)[:160]})") from error
    if found:
        raise ConfigError(key, path, f"{allowed} ({found})")
    if not isinstance(stored, dict) or not _describes_a_run(stored):
        raise ConfigError(key, path, "a checkpoint of train.py")
    return stored


def _describes_a_run(stored: Mapping[str, Any]) -> bool:
    """Whether a checkpoint says what the rest relies on: its images, its classes, and how far Lightning came."""
    about, weights = stored.get("qatkit"), stored.get("state_dict")
    if not isinstance(about, dict) or not isinstance(weights, dict) or "loops" not in stored:
        return False
    sizes, classes = about.get("input_shape", [1, 1, 1]), about.get("num_classes")
    if not isinstance(sizes, list) or len(sizes) not in (1, 3):  # samples, or channels and two axes
        return False
    numbers = [*sizes, 1 if classes is None else classes]
    return all(type(one) is int and 0 < one < _LARGEST_SIZE for one in numbers)


def main_process() -> bool:
    """Whether this is rank 0, which alone writes and speaks."""
    return getattr(rank_zero_only, "rank", 0) == 0


def say(text: str) -> None:
    """One line for whoever waits, from rank 0 alone."""
    if main_process():
        print(text, file=sys.stderr, flush=True)
