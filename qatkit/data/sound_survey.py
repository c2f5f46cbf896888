"""The survey of sound files: each file is read once before any long work, to find unusable files.

Samples stay in memory up to a limit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qatkit.data.image_files import printable
from qatkit.data.resampling import resampled
from qatkit_verify.errors import ConfigError, one_line
from qatkit_verify.installed import install_extra
from qatkit_verify.sound_files import Samples, read_sound

KEPT = 2**29  # bytes of samples that stay in memory; other files are decoded again whenever they are needed
_SHOWN = 5


@dataclass(frozen=True)
class Recording:
    """A usable sound file.

    Attributes:
        path: path of the file.
        rate: sampling rate of the file, in Hz.
        count: number of samples at the model's rate.
        digest: digest of these samples.
        kept: these samples, or None if the limit on memory was reached.
    """

    path: str
    rate: int
    count: int
    digest: bytes
    kept: Samples | None


class SoundSurvey:
    """A survey that reads every file once, keeps samples up to a limit, and finds unusable files.

    Args:
        root: folder of the data, for messages.
        rate: the sampling rate in Hz to which samples are converted.
        least: minimum number of samples of a usable file.
        bad: "refuse" or "skip", for files that cannot be used.
    """

    def __init__(self, root: str, rate: int, least: int, bad: str) -> None:
        self.root, self.rate, self.least, self.bad = root, rate, least, bad
        self.unusable: dict[str, str] = {}
        self.seen, self._room = 0, KEPT

    def usable(self, paths: Sequence[str]) -> list[Recording]:
        """Returns the files that can be read, have enough samples, and are not silent.

        Raises:
            ConfigError: a file cannot be used and `bad` is "refuse", no file is left, or a FLAC file needs an
                extra that is not installed.
        """
        found = [one for one in map(self._recording, paths) if one is not None]
        self.seen += len(paths)
        if found and self.unusable and self.bad == "refuse":
            told = f"{self._told()}; set data.bad=skip to leave them out"
            raise ConfigError("data.root", self.root, reason=told)
        if not found:
            raise ConfigError("data.root", self.root, reason=self._told())
        return found

    def notes(self) -> list[str]:
        """Returns the report's notes on files that were left out."""
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
            rate, samples = samples_of(path, self.rate)
            if not np.ptp(samples):
                raise ValueError("silent")
            if len(samples) < self.least:
                raise ValueError(
                    f"{len(samples)} samples at {self.rate} Hz, fewer than a frame of {self.least}"
                )
        except ImportError as error:
            name = printable(os.path.relpath(path, self.root))
            needed = (
                f"{name} is a FLAC file and needs the extra audio; install it with {install_extra('audio')}"
            )
            raise ConfigError("data.root", self.root, reason=f"{needed} ({one_line(error)})") from error
        except Exception as error:  # damaged bytes may raise anything in decoders
            strerror = error.strerror if isinstance(error, OSError) else None
            self.unusable[path] = strerror.lower() if strerror else one_line(error)
            return None
        kept = samples if samples.nbytes <= self._room else None
        self._room -= 0 if kept is None else kept.nbytes
        return Recording(path, rate, len(samples), hashlib.sha256(samples.tobytes()).digest(), kept)


class _Read(NamedTuple):
    rate: int
    samples: Samples


def samples_of(path: str, rate: int) -> _Read:
    """Returns the sampling rate of a file, and its samples converted to `rate`."""
    sound = read_sound(path)
    return _Read(sound.rate, resampled(sound.samples, sound.rate, rate))


def resampling_note(files: Sequence[Recording], rate: int) -> list[str]:
    """Returns the report's note on files of other rates; no note if there are none."""
    others = sorted({file.rate for file in files} - {rate})
    if not others:
        return []
    count = sum(file.rate != rate for file in files)
    told = f"{count} of {len(files)} audio files were resampled to {rate} Hz from"
    return [f"{told} {', '.join(map(str, others))} Hz"]


def repeated_note(train: Sequence[Recording], test: Sequence[Recording]) -> list[str]:
    """Returns the report's note on verification files with the same samples as a calibration file."""
    known = {file.digest: file.path for file in train}
    same = {file.path: known[file.digest] for file in test if file.digest in known}
    if not same:
        return []
    pairs = (f"{os.path.basename(a)} equals {os.path.basename(b)}" for a, b in list(same.items())[:_SHOWN])
    told = f"verification files with the same samples as a calibration file: {len(same)} of {len(test)}"
    return [f"{told}, {printable(', '.join(pairs))}"]
