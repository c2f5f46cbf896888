"""Frames of WAV and FLAC files, for a model whose input is a waveform.

    DIR/**/*.wav, *.flac ── sorted by path ──> files ── every other one calibrates and trains, the others verify
    DIR/train, DIR/test                        if both exist, they are the two splits
    file ── one channel ── data.rate ── frames of the input's length, one every data.hop samples ──> samples

The frames of a file are consecutive, so for a model with states (`qatkit.data.rollout`) a file is a sequence.
Samples after the last full frame of a file are not used. `qatkit.data.wave_input` finds the input's time
axis.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit.config.schema import DataConfig
from qatkit.data.image_files import left_out_note
from qatkit.data.request import Request
from qatkit.data.sound_survey import Recording, SoundSurvey, repeated_note, resampling_note, samples_of
from qatkit.data.sources import Splits
from qatkit.data.wave_input import WaveInput, wave_input
from qatkit.tasks.base import NO_TARGET
from qatkit_verify.errors import ConfigError
from qatkit_verify.pictures import files_below
from qatkit_verify.sound_files import SUFFIXES, Samples

_LAYOUT = "a folder with WAV or FLAC files"
_SHOWN = 5


class AudioFrames:
    """A dataset of the frames of sound files; an item is (arrays by name, target).

    Args:
        files: the files, each at least one frame long.
        wave: the model's input, which defines the frames.

    Attributes:
        lengths: number of frames of each file.
        targets: `NO_TARGET` for each frame.
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
            self._open = (file.path, samples_of(file.path, self.wave.rate).samples)
        return self._open[1]


def audio(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns the frames of the WAV and FLAC files in a folder and its subfolders.

    Raises:
        ConfigError: the folder does not exist, has fewer than two usable files, or has none for a split; a
            file is unusable with data.bad=refuse; or as for `wave_input`.
    """
    if root is None or not Path(root).is_dir():
        problem = "" if root is None else "; there is no such folder"
        raise ConfigError("data.root", root, _LAYOUT + problem)
    asked = request if request is not None else Request(DataConfig())
    wave = wave_input(asked)
    parts = [Path(root, name) for name in ("train", "test")]
    folders = parts if all(part.is_dir() for part in parts) else [Path(root)]
    paths, left_out = list[list[str]](), list[str]()
    for folder in folders:
        found, others = files_below(folder, lambda name: name.lower().endswith(SUFFIXES), "data.root")
        if not found:
            has = f" (it has {', '.join(_kinds(others))})" if others else ""
            raise ConfigError("data.root", root, f"{_LAYOUT}; {folder.name or root} has none{has}")
        paths.append(found)
        left_out += others
    known = SoundSurvey(root, wave.rate, wave.frame, asked.settings.bad)
    files = [known.usable(one) for one in paths]
    if len(files) == 1:
        if len(files[0]) < 2:
            allowed = (
                "a folder with at least two usable WAV or FLAC files, since no file may be used for both "
                "calibration and verification"
            )
            raise ConfigError("data.root", root, f"{allowed}; it has {len(files[0])}")
        files = [files[0][start::2] for start in (0, 1)]
    train, test = (AudioFrames(one, wave) for one in files)
    notes = (*_notes(files, wave), *known.notes(), *left_out_note(left_out))
    return Splits(train, test, (), notes=notes, arrays=True, batched=wave.batched)


def _kinds(paths: Sequence[str]) -> list[str]:
    """Returns at most `_SHOWN` file name extensions, or as many names if no file has an extension."""
    found = sorted({os.path.splitext(path)[1].lower() for path in paths} - {""})
    return found[:_SHOWN] or [os.path.basename(path) for path in paths[:_SHOWN]]


def _notes(files: Sequence[Sequence[Recording]], wave: WaveInput) -> list[str]:
    """Returns the report's notes on the frames, on resampled files, and on files that are in both splits."""
    train, test = files
    given = [
        f"{len(part)} audio file{'s' if len(part) > 1 else ''} ({_seconds(part, wave)})" for part in files
    ]
    notes = [f"{given[0]} for calibration and training, {given[1]} for verification; {wave.text}"]
    return [*notes, *resampling_note([*train, *test], wave.rate), *repeated_note(train, test)]


def _seconds(files: Sequence[Recording], wave: WaveInput) -> str:
    return f"{sum(file.count for file in files) / wave.rate:,.1f} s"
