"""The preparation of recordings as batches of features, computed by `qatkit_verify.sound`.

    data.rate, seconds, features, ... ── SoundPreprocess, which the bundle carries as JSON ──> [N, 1, frames, bands]
    data.features_in=graph                                                                 ──> [N, samples]

The caller passes one `random.Random` per training recording, so that its augmentation depends neither on its batch nor
on the worker that prepares it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qatkit.config.schema import DataConfig
from qatkit.config.schema.model import DIGITS_SPOKEN, PICTURE_AUGMENTATIONS, TONES
from qatkit.data.inputs import ImageInputs
from qatkit.data.wave_input import RATE
from qatkit_verify.errors import ConfigError
from qatkit_verify.sound import SoundPreprocess
from qatkit_verify.sound_files import Samples
from qatkit_verify.sound_limits import LARGEST_WINDOW, LOG_MEL, LONGEST, MFCC, WAVEFORM

_RATES = {DIGITS_SPOKEN: 8000, TONES: 8000}
_WINDOW = 0.04  # seconds
# Approximate mean and standard deviation of speech followed by zeros: 300 spoken digits have -9.7 and 5.2 as
# log-mel features, and -6.5 and 21.1 as MFCCs.
_USUAL = {LOG_MEL: (-9.0, 5.0), MFCC: (-6.0, 20.0)}
_SHIFT, _GAIN, _NOISE = 0.1, 6.0, (10.0, 40.0)  # maximum shift in s, maximum gain in dB, noise level in dB


@dataclass(frozen=True)
class RecordingInputs(ImageInputs):
    """The inputs of a model for recordings: features [1, frames, bands], or samples [T]."""

    said_by = "data.seconds and data.features define them"

    @property
    def text(self) -> str:
        return f"recordings [N, {', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Recordings:
    """The preparation of batches of recordings.

    Attributes:
        sound: the whole preprocessing from samples to features, including any part that the model computes.
        in_graph: whether the model's input is samples, from which the model itself computes the features.
        source: dotted path of the source, for messages.
    """

    sound: SoundPreprocess
    in_graph: bool = False
    source: str = ""

    @property
    def taken(self) -> SoundPreprocess:
        """Returns the part of the preprocessing that is computed outside the model."""
        return replace(self.sound, features=WAVEFORM) if self.in_graph else self.sound

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the model's input for one recording."""
        return self.taken.shape

    def inputs(self) -> RecordingInputs:
        """Returns the inputs of the model."""
        return RecordingInputs(self.shape)

    def as_dict(self) -> dict[str, Any]:
        """Returns the preprocessing outside the model as plain values for JSON."""
        return self.taken.as_dict()

    def checked(self, item: Any, name: str) -> NDArray[Any]:
        """Returns an item of a source as int16 or float32 [T].

        Raises:
            ConfigError: the item is not a recording.
        """
        found = np.asarray(item)
        right = found.ndim == 1 and found.size and (found.dtype.kind == "f" or found.dtype == np.int16)
        if not right:
            told = f"{name} is {found.dtype} {list(found.shape)}; recordings must be float or int16 [T]"
            raise ConfigError("data.source", self.source, reason=told)
        return found if found.dtype == np.int16 else found.astype(np.float32, copy=False)

    def content(self, item: NDArray[Any]) -> bytes:
        """Returns bytes that identify a recording."""
        return item.tobytes()

    def eval_batch(self, recordings: Iterable[NDArray[Any]]) -> Tensor:
        """Returns recordings as the model's input for evaluation, float32 [N, *shape]."""
        return torch.from_numpy(self.taken.batch(list(recordings)))

    def train_batch(
        self,
        recordings: Iterable[NDArray[Any]],
        augment: str,
        draws: Sequence[random.Random],
        policy: str = "none",
    ) -> Tensor:
        """Returns recordings as the model's input for training, float32 [N, *shape].

        Args:
            recordings: recordings of any lengths.
            augment: one of the choices of `data.augment` for sound.
            draws: one source of random numbers per recording.
            policy: unused, since policies only exist for pictures.
        """
        pairs = zip(recordings, draws, strict=True)
        return self.eval_batch(augmented(one, augment, draw, self.sound.rate) for one, draw in pairs)


def in_unit(recording: NDArray[Any]) -> Samples:
    """Returns the samples of a recording in -1..1; int16 is converted without rounding."""
    found: Samples = recording.astype(np.float32, copy=False)
    return found * np.float32(2**-15) if recording.dtype == np.int16 else found


def augmented(recording: NDArray[Any], augment: str, draw: random.Random, rate: int) -> NDArray[Any]:
    """Returns a recording with a random time shift and, if `augment` names them, a random gain and white noise.

    With `augment` "none", the recording is unchanged.
    """
    if augment == "none":
        return recording
    samples = in_unit(recording)
    changed = _shifted(samples, draw.randint(-int(_SHIFT * rate), int(_SHIFT * rate)))
    if "gain" in augment:
        changed = changed * np.float32(10 ** (draw.uniform(-_GAIN, _GAIN) / 20))
    if "noise" in augment:
        below, seed = draw.uniform(*_NOISE), draw.getrandbits(63)
        level = float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) * 10 ** (-below / 20)
        noise = np.random.default_rng(seed).standard_normal(len(changed), dtype=np.float32)
        changed = changed + np.float32(level) * noise
    return changed.clip(-1, 1)


def _shifted(samples: Samples, by: int) -> Samples:
    """Returns samples shifted later or earlier and padded with zeros; at least half of the recording remains."""
    if by >= 0:
        return np.concatenate([np.zeros(by, np.float32), samples])
    by = min(-by, len(samples) // 2)
    return np.concatenate([samples[by:], np.zeros(by, np.float32)])


def recordings_of(config: DataConfig) -> Recordings:
    """Returns the preparation that the data group describes.

    Raises:
        ConfigError: settings do not fit together, or one of them applies only to pictures.
    """
    _check_plain(config)
    rate = rate_of(config)
    kind, seconds = config.features or LOG_MEL, 1.0 if config.seconds is None else config.seconds
    samples, window = round(rate * seconds), config.frame or round(rate * _WINDOW)
    mels, coefficients = (
        config.mels or SoundPreprocess.mels,
        config.coefficients or SoundPreprocess.coefficients,
    )
    if not 2 <= window <= LARGEST_WINDOW:
        usual = "" if config.frame is not None else f"; the default at {rate} Hz is {window}"
        raise ConfigError(
            "data.frame", config.frame, f"a number of samples from 2 to {LARGEST_WINDOW}{usual}"
        )
    if not window <= samples <= LONGEST:
        allowed = f"a number from {window / rate:g} (one window of {window} samples) to {LONGEST / rate:g} at {rate} Hz"
        raise ConfigError("data.seconds", seconds, allowed)
    if config.coefficients is not None and kind != MFCC:
        raise ConfigError("data.coefficients", coefficients, f"null with data.features={kind}")
    if kind == MFCC and coefficients > mels:
        usual = "" if config.coefficients is not None else f"; the default is {coefficients}"
        allowed = f"at most {mels}, the number of mel bands (data.mels){usual}"
        raise ConfigError("data.coefficients", config.coefficients, allowed)
    mean, std = _USUAL[kind] if config.mean is None or config.std is None else (config.mean[0], config.std[0])
    hop, offset = config.hop or max(1, window // 2), config.log_offset or SoundPreprocess.log_offset
    sound = SoundPreprocess(
        rate, samples, kind, window, hop, mels, coefficients, offset, float(mean), float(std)
    )
    return Recordings(sound, config.features_in == "graph", config.source)


def rate_of(config: DataConfig) -> int:
    """Returns the sampling rate in Hz to which recordings are converted."""
    return config.rate or _RATES.get(config.source, RATE)


def _check_plain(config: DataConfig) -> None:
    """Raises ConfigError for a setting that applies only to pictures."""
    told = f"with data.source={config.source}, which gives recordings"
    for key in ("image_size", "resize", "fit", "pad_value", "align", "channels", "layout", "pixels"):
        if getattr(config, key) is not None:
            raise ConfigError(f"data.{key}", getattr(config, key), f"null {told}")
    for key in ("policy", "cache"):
        if getattr(config, key) != "none":
            raise ConfigError(f"data.{key}", getattr(config, key), f"none {told}")
    if config.augment in PICTURE_AUGMENTATIONS:
        raise ConfigError(
            "data.augment", config.augment, f"one of none, shift, shift_gain, shift_gain_noise {told}"
        )
    for key in ("mean", "std"):
        value = getattr(config, key)
        if value is not None and len(value) != 1:
            raise ConfigError(f"data.{key}", value, f"one number {told}")
