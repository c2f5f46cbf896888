"""Frames of WAV and FLAC files, for a model that takes the samples of a wave.

    DIR/**/*.wav, *.flac ── sorted by path ──> files ── every other one calibrates and trains, the others verify
    DIR/train, DIR/test                        where both exist they are the two splits
    file ── one channel ── data.rate ── frames of the input's length, one every data.hop samples ──> samples

The frames of a file are consecutive, so of a model with states (`qatkit.data.rollout`) a file is a sequence. What
comes behind its last whole frame is not used. Which axis of the input is time, `qatkit.data.wave_input` finds.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qatkit.config.schema import DataConfig
from qatkit.data.image_files import left_out_note, printable
from qatkit.data.request import Request
from qatkit.data.sound_files import SUFFIXES, Samples, read_sound, resampled
from qatkit.data.sources import Splits
from qatkit.data.wave_input import WaveInput, wave_input
from qatkit.tasks.base import NO_TARGET
from qatkit_verify.errors import ConfigError, one_line
from qatkit_verify.pictures import files_below

KEPT = 2**29  # bytes of samples in memory; those of other files are decoded again when they are asked for
_LAYOUT = "a folder with WAV or FLAC files"
_SHOWN = 5


@dataclass(frozen=True)
class Recording:
    """A file that was found whole.

    Attributes:
        path: of the file.
        rate: its own.
        count: samples at the model's rate.
        digest: of these samples.
        kept: these samples; None where memory has no room for them.
    """

    path: str
    rate: int
    count: int
    digest: bytes
    kept: Samples | None


class AudioFrames:
    """The frames of some files; an item is (arrays by name, target).

    Args:
        files: at least one frame long.
        wave: the input that frames are made for.

    Attributes:
        lengths: frames of each file.
        targets: none of any frame.
    """

    def __init__(self, files: Sequence[Recording], wave: WaveInput) -> None:
        self.files, self.wave = files, wave
        self.lengths = [1 + (file.count - wave.frame) // wave.hop for file in files]
        self.targets = [NO_TARGET] * sum(self.lengths)
        self._ends = list(accumulate(self.lengths))
        self._open: tuple[str, Samples] = ("", np.empty(0, np.float32))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[dict[str, NDArray[Any]], int]:
        place = bisect_right(self._ends, index)
        start = (index - (self._ends[place] - self.lengths[place])) * self.wave.hop
        samples = self._samples(self.files[place])
        return {self.wave.name: self.wave.array(samples[start : start + self.wave.frame])}, NO_TARGET

    def _samples(self, file: Recording) -> Samples:
        if file.kept is not None:
            return file.kept
        if self._open[0] != file.path:
            self._open = (file.path, _samples_of(file.path, self.wave.rate)[1])
        return self._open[1]


def audio(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the frames of the WAV and FLAC files of a folder and of those below it.

    Raises:
        ConfigError: no such folder, fewer than two files, files that can't be used, or a model that takes no wave.
    """
    if root is None or not Path(root).is_dir():
        raise ConfigError("data.root", root, f"{_LAYOUT}; there is no such folder")
    asked = request if request is not None else Request(DataConfig())
    wave = wave_input(asked)
    parts = [Path(root, name) for name in ("train", "test")]
    folders = parts if all(part.is_dir() for part in parts) else [Path(root)]
    paths, left_out = list[list[str]](), list[str]()
    for folder in folders:
        found, others = files_below(folder, lambda name: name.lower().endswith(SUFFIXES), "data.root")
        if not found:
            has = f" ({', '.join(_kinds(others))} are no such files)" if others else ""
            raise ConfigError("data.root", root, f"{_LAYOUT}; {folder.name or root} has none{has}")
        paths.append(found)
        left_out += others
    known = _Survey(root, wave, asked.settings.bad)
    files = [known.usable(one) for one in paths]
    if len(files) == 1:
        if len(files[0]) < 2:
            allowed = (
                "a folder with at least two usable WAV or FLAC files, since no file may calibrate and verify"
            )
            raise ConfigError("data.root", root, f"{allowed}; it has {len(files[0])}")
        files = [files[0][start::2] for start in (0, 1)]
    train, test = (AudioFrames(one, wave) for one in files)
    notes = (*_notes(files, wave), *known.notes(), *left_out_note(left_out))
    return Splits(train, test, (), notes=notes, arrays=True, batched=wave.batched)


def _kinds(paths: Sequence[str]) -> list[str]:
    """The endings of names, without what has none."""
    found = sorted({os.path.splitext(path)[1].lower() for path in paths} - {""})
    return found[:_SHOWN] or [os.path.basename(path) for path in paths[:_SHOWN]]


class _Survey:
    """Reads every file once, keeps samples as far as memory goes, and finds what can't be used.

    Args:
        root: of the data, for messages.
        wave: the input that frames are made for.
        bad: "refuse" or "skip" files that can't be used.
    """

    def __init__(self, root: str, wave: WaveInput, bad: str) -> None:
        self.root, self.wave, self.bad = root, wave, bad
        self.unusable: dict[str, str] = {}
        self.seen, self._room = 0, KEPT

    def usable(self, paths: Sequence[str]) -> list[Recording]:
        """Returns the files that have a frame.

        Raises:
            ConfigError: files that can't be used, of which nothing says to skip them; or none is left.
        """
        found = [one for one in map(self._recording, paths) if one is not None]
        self.seen += len(paths)
        if self.unusable and self.bad == "refuse":
            raise ConfigError("data.root", self.root, reason=f"{self._told()}; data.bad=skip leaves them out")
        if not found:
            raise ConfigError("data.root", self.root, reason=self._told())
        return found

    def notes(self) -> list[str]:
        """Returns what the report says of files that were left out."""
        return [f"data.bad=skip: {self._told()}"] if self.unusable else []

    def _told(self) -> str:
        some = [
            f"{printable(os.path.relpath(path, self.root))} ({why})"
            for path, why in list(self.unusable.items())[:_SHOWN]
        ]
        more = f" and {len(self.unusable) - _SHOWN} more" if len(self.unusable) > _SHOWN else ""
        return f"{len(self.unusable)} of {self.seen} audio files can't be used: {', '.join(some)}{more}"

    def _recording(self, path: str) -> Recording | None:
        try:
            rate, samples = _samples_of(path, self.wave.rate)
            if not np.ptp(samples):
                raise ValueError("silent")
            if len(samples) < self.wave.frame:
                told = (
                    f"{len(samples)} samples at {self.wave.rate} Hz, fewer than a frame of {self.wave.frame}"
                )
                raise ValueError(told)
        except ImportError as error:
            name = printable(os.path.relpath(path, self.root))
            told = f"{name} is FLAC, which needs the extra audio: pip install 'qatkit[audio]' ({one_line(error)})"
            raise ConfigError("data.root", self.root, reason=told) from error
        except Exception as error:  # of the disk, and whatever bytes make of decoders
            strerror = error.strerror if isinstance(error, OSError) else None
            self.unusable[path] = strerror.lower() if strerror else one_line(error)
            return None
        self._room -= samples.nbytes
        kept = samples if self._room >= 0 else None
        return Recording(path, rate, len(samples), hashlib.sha256(samples.tobytes()).digest(), kept)


class _Read(NamedTuple):
    rate: int
    samples: Samples


def _samples_of(path: str, rate: int) -> _Read:
    """The own rate of a file, and its samples at another one."""
    sound = read_sound(path)
    return _Read(sound.rate, resampled(sound.samples, sound.rate, rate))


def _notes(files: Sequence[Sequence[Recording]], wave: WaveInput) -> list[str]:
    """Returns the report's notes on the frames, on files of other rates, and on files that are in both splits."""
    train, test = files
    given = [
        f"{len(part)} audio file{'s' if len(part) > 1 else ''} ({_seconds(part, wave)})" for part in files
    ]
    notes = [f"{given[0]} to calibrate and train, {given[1]} to verify; {wave.text}"]
    others = sorted({file.rate for part in files for file in part} - {wave.rate})
    if others:
        count = sum(file.rate != wave.rate for part in files for file in part)
        told = f"{count} of {len(train) + len(test)} audio files were resampled to {wave.rate} Hz from"
        notes.append(f"{told} {', '.join(map(str, others))} Hz")
    same = _in_both(train, test)
    if same:
        some = ", ".join(
            f"{os.path.basename(a)} is {os.path.basename(b)}" for a, b in list(same.items())[:_SHOWN]
        )
        told = f"{len(same)} of {len(test)} files that verify have the samples of one that calibrates"
        notes.append(f"{told}: {printable(some)}")
    return notes


def _seconds(files: Sequence[Recording], wave: WaveInput) -> str:
    return f"{sum(file.count for file in files) / wave.rate:,.1f} s"


def _in_both(train: Sequence[Recording], test: Sequence[Recording]) -> Mapping[str, str]:
    """Files that verify, with the file of the same samples that calibrates."""
    known = {file.digest: file.path for file in train}
    return {file.path: known[file.digest] for file in test if file.digest in known}
