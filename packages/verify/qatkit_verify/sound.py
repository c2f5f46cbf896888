"""Turns the samples of a recording into the model's input with NumPy, bit-identical to training.

    float [T] in -1..1 ── cut, or zero-padded ── int16 steps ── windows ── |DFT|^2 ── mel bands ── ln ── (DCT)
    ── (x - mean) / std ── float32 [1, 1, frames, bands]

Training calls this very code. The result is the same in every bit on every CPU, with every version of
NumPy and in JavaScript (`javascript/sound.mjs`), since nothing depends on the order of a sum or on a
mathematical library:

- samples are multiples of 2^-15, and windowed cosines and sines are multiples of 2^-20, so each sum of the
  DFT is an integer below 2^53, which float64 holds exactly in any order of summation;
- bands and the DCT are float64 sums, each product and each sum rounded by itself, in ascending order;
- cosines and logarithms are those of `exact_math`.

Windows are (periodic) Hann windows within the recording. Bands are triangles over the mel scale of HTK,
1127 ln(1 + f / 700), without normalisation. The DCT is the orthonormal DCT-II.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError
from qatkit_verify.exact_math import Doubles, cosine_of_turns, natural_log
from qatkit_verify.sound_limits import (
    FEATURES,
    LARGEST_MELS,
    LARGEST_WINDOW,
    LEAST_OFFSET,
    LOG_MEL,
    LONGEST,
    MFCC,
    WAVEFORM,
)

_STEPS, _WEIGHT_STEPS = 2.0**15, 2.0**20

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SoundPreprocess:
    """The preprocessing of a recording, as described in preprocess.json and model.json.

    Args:
        rate: the number of samples per second of the recordings.
        samples: the number of samples that are kept: longer recordings are cut off, shorter ones are padded
            with zeros.
        features: one of `FEATURES`; "waveform" stands for the samples, from which the model computes its
            own features.
        window: the number of samples in a window.
        hop: the number of samples from the start of one window to the start of the next.
        mels: the number of bands from 0 to half of `rate`.
        coefficients: for "mfcc", the number of first coefficients of the DCT.
        log_offset: the number that is added to a band's power before the logarithm.
        mean, std: the normalisation of the features; "waveform" is not normalised.
    """

    rate: int
    samples: int
    features: str = LOG_MEL
    window: int = 640
    hop: int = 320
    mels: int = 40
    coefficients: int = 10
    log_offset: float = 1e-6
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SoundPreprocess:
        """Reads the preprocessing from the output of `as_dict`; other keys are ignored.

        Raises:
            ConfigError: a value is missing, unknown to this version, or too large for the others.
        """
        kind = values.get("features")
        if kind not in FEATURES:
            raise ConfigError("preprocess.json: features", kind, " | ".join(FEATURES))
        known = {key: values.get(key) for key in _KEYS[kind]}
        for key, value in known.items():
            allowed, is_allowed = _ALLOWED[key]
            if not is_allowed(value):
                raise ConfigError(f"preprocess.json: {key}", value, allowed)
        made = cls(features=kind, **known)  # type: ignore[arg-type]
        if kind != WAVEFORM and made.window > made.samples:
            raise ConfigError(
                "preprocess.json: window", made.window, f"at most the number of samples ({made.samples})"
            )
        if kind == MFCC and made.coefficients > made.mels:
            raise ConfigError(
                "preprocess.json: coefficients",
                made.coefficients,
                f"at most the number of mels ({made.mels})",
            )
        return made

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, without the settings that the features do not use."""
        return {"features": self.features} | {key: asdict(self)[key] for key in _KEYS[self.features]}

    @property
    def frames(self) -> int:
        """The number of windows."""
        return 1 + (self.samples - self.window) // self.hop

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the model's input for one recording: [samples], or [1, frames, bands]."""
        if self.features == WAVEFORM:
            return (self.samples,)
        return (1, self.frames, self.mels if self.features == LOG_MEL else self.coefficients)

    def __call__(self, recording: NDArray[Any]) -> Floats:
        """Returns the input for one recording, [1, *shape].

        Args:
            recording: the samples [T] at `rate`, floats in -1..1 or int16.

        Raises:
            ConfigError: the array is not such a recording.
        """
        return self.batch([recording])

    def batch(self, recordings: Sequence[NDArray[Any]]) -> Floats:
        """Returns the model's input [N, *shape] for N recordings of any lengths, each in the form of `__call__`."""
        steps = np.stack([self._fitted(one) for one in recordings])
        if self.features == WAVEFORM:
            return (steps / _STEPS).astype(np.float32)
        bands = natural_log(self._bands(steps) + self.log_offset)
        if self.features == MFCC:
            bands = _sums(bands, cosines(self.mels, self.coefficients))
        return ((bands - self.mean) / self.std).astype(np.float32)[:, None]

    def _fitted(self, recording: NDArray[Any]) -> Doubles:
        """Returns a recording [samples], cut or zero-padded and clipped to -1..1, in steps of 2^-15."""
        found = np.asarray(recording)
        if found.ndim != 1 or not found.size or not (found.dtype.kind == "f" or found.dtype == np.int16):
            told = f"{found.dtype} {list(found.shape)}"
            raise ConfigError("recording", told, "float [T] in -1..1, or int16 [T], of at least one sample")
        steps = np.zeros(self.samples)
        part = found[: self.samples].astype(np.float64)
        if found.dtype.kind == "f":
            part = np.rint(part * _STEPS)
            if not np.isfinite(part).all():
                raise ConfigError("recording", "NaN or infinity", "finite samples")
        steps[: len(part)] = part.clip(-_STEPS, _STEPS - 1)
        return steps

    def _bands(self, steps: Doubles) -> Doubles:
        """Returns the power of each band, [N, frames, mels], of samples [N, samples]."""
        windows = np.lib.stride_tricks.sliding_window_view(steps, self.window, axis=1)[:, :: self.hop]
        transform, powers = waves(self.window), list[Doubles]()
        for part in transform:  # the values are integers, so the matrix product is exact
            found = (np.ascontiguousarray(windows) @ part) * (1 / (_STEPS * _WEIGHT_STEPS))
            powers.append(found * found)
        return _gathered(powers[0] + powers[1], *triangles(self.rate, self.window, self.mels))


@functools.lru_cache(4)
def waves(window: int) -> tuple[Doubles, Doubles]:
    """Returns the windowed cosines and sines as integer multiples of 2^-20, [window, window // 2 + 1] each."""
    times, bins = np.arange(window), np.arange(window // 2 + 1)
    hann = 0.5 - 0.5 * cosine_of_turns(times, window)
    turns, parts = np.outer(times, bins) * 4, 4 * window
    # sin(x) = cos(x - a quarter of a turn); a turn is 4 windows, so a quarter is an integer number of parts.
    known = cosine_of_turns(np.arange(parts), parts)
    found = (known[(turns - shift) % parts] for shift in (0, window))
    cosine, sine = (np.rint(hann[:, None] * one * _WEIGHT_STEPS) for one in found)
    return cosine, sine


@functools.lru_cache(4)
def triangles(rate: int, window: int, mels: int) -> tuple[NDArray[np.int64], Doubles]:
    """Returns the bins of each band, [mels, K] ascending, and their weights.

    The weights are 0 where a band has fewer than K bins.
    """
    bins = window // 2 + 1
    hertz: Doubles = np.arange(bins, dtype=np.float64) * (rate / window)
    place = natural_log(1.0 + hertz / 700.0) * 1127.0
    step = natural_log(np.array([1.0 + (rate / 2) / 700.0]))[0] * 1127.0 / (mels + 1)
    edges = np.arange(mels)[:, None] * step  # the start of each band
    rising, falling = (place - edges) / step, (edges + 2.0 * step - place) / step
    weight = np.maximum(0.0, np.minimum(rising, falling))
    first = np.where(weight.any(1), (weight > 0).argmax(1), 0)
    ends = ((weight > 0) * (np.arange(bins) + 1)).max(1)
    width = max(1, int((ends - first).max()))
    index = first[:, None] + np.arange(width)
    inside = index < bins
    index = np.minimum(index, bins - 1)
    return index, np.where(inside, np.take_along_axis(weight, index, 1), 0.0)


@functools.lru_cache(4)
def cosines(mels: int, coefficients: int) -> Doubles:
    """Returns the matrix of the orthonormal DCT-II, [mels, coefficients]."""
    odd, order = 2 * np.arange(mels)[:, None] + 1, np.arange(coefficients)
    scale = np.where(order == 0, math.sqrt(1.0 / mels), math.sqrt(2.0 / mels))
    return cosine_of_turns(odd * order, 4 * mels) * scale


def _gathered(power: Doubles, index: NDArray[np.int64], weight: Doubles) -> Doubles:
    """Returns the weighted sums of bins, added tap by tap."""
    total = power[..., index[:, 0]] * weight[:, 0]
    for tap in range(1, index.shape[1]):
        total += power[..., index[:, tap]] * weight[:, tap]
    return np.asarray(total)


def _sums(values: Doubles, weight: Doubles) -> Doubles:
    """Returns the product of [..., n] and [n, m], summed in ascending order."""
    total = values[..., :1] * weight[0]
    for place in range(1, len(weight)):
        total += values[..., place : place + 1] * weight[place]
    return np.asarray(total)


def _whole(most: int, least: int = 1) -> tuple[str, Callable[[Any], bool]]:
    return (
        f"an integer from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_offset(value: Any) -> bool:
    return _is_number(value) and LEAST_OFFSET <= value <= 1


# For each key: the allowed values in words, and their test.
_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rate": _whole(400_000),
    "samples": _whole(LONGEST),
    "window": _whole(LARGEST_WINDOW, 2),
    "hop": _whole(LONGEST),
    "mels": _whole(LARGEST_MELS),
    "coefficients": _whole(LARGEST_MELS),
    "log_offset": (f"a number from {LEAST_OFFSET:g} to 1", _is_offset),
    "mean": ("a number", _is_number),
    "std": ("a positive number", _is_positive),
}
_OF_BANDS = ("rate", "samples", "window", "hop", "mels", "log_offset", "mean", "std")
_KEYS = {WAVEFORM: ("rate", "samples"), LOG_MEL: _OF_BANDS, MFCC: (*_OF_BANDS, "coefficients")}
