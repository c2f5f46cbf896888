"""The input of a model for samples of a wave: its time axis, frame length, rate and type.

The time axis is the only axis that is not the batch axis and whose size may differ from 1: [N, T], [N, 1, T],
[T], [N, T, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit.config.schema import DataConfig
from qatkit.data.arrays import LONE, Port
from qatkit.data.request import Request
from qatkit_verify.errors import ConfigError
from qatkit_verify.sound_files import Samples

RATE = 16000  # default rate, in Hz
_RATE_NAMES = ("sr", "fs", "samplerate", "samplingrate", "samplerateh", "sampleratehz", "audiosamplerate")
_RATES = range(1000, 400_000)
# For each value of `data.axes`: the number of axes, and the time axis.
_NAMED = {"nt": (2, 1), "n1t": (3, 2), "nt1": (3, 1), "t": (1, 0)}
_LEAST_SPECTRUM = (
    32  # an axis of 2 ** k + 1 values, if longer than this, is a spectrum and not a frame of a wave
)
_INT16 = 2**15


@dataclass(frozen=True)
class WaveInput:
    """An input for frames of a wave.

    Attributes:
        name: name of the input.
        shape: shape of a frame, with the batch axis.
        axis: the time axis.
        dtype: name of the input's type in NumPy.
        full: the input's value for a sample of 1.0 (full scale).
        rate: samples per second.
        hop: number of samples from the start of a frame to the start of the next one.
        because: a phrase that says where the rate comes from, for `text`.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    dtype: str
    full: int
    rate: int
    hop: int
    because: str

    @property
    def frame(self) -> int:
        """Returns the number of samples of a frame."""
        return self.shape[self.axis]

    @property
    def batched(self) -> bool:
        """Returns whether the input has an axis besides time, so that a batch may hold several frames."""
        return len(self.shape) > 1

    @property
    def text(self) -> str:
        """A description of the frames: their length, range, hop and sampling rate."""
        levels = f" in -{self.full}..{self.full - 1}" if self.full > 1 else ""
        told = f"frames of {self.frame} samples{levels} for '{self.name}', one every {self.hop} samples"
        return f"{told}, at {self.rate} Hz ({self.because})"

    def array(self, samples: Samples) -> NDArray[Any]:
        """Returns a frame in the shape, range and type of the input.

        Args:
            samples: the samples, in [-1, 1].
        """
        made: NDArray[Any] = samples
        if self.full > 1:
            made = samples * np.float32(self.full)
        if np.dtype(self.dtype).kind == "i":
            made = np.rint(made).clip(-self.full, self.full - 1)
        return made.astype(self.dtype).reshape(self.shape)


def wave_input(request: Request) -> WaveInput:
    """Returns the model's input for a wave.

    If the model declares no inputs, it is float32 with the axes `data.axes`, [N, T] by default.

    Raises:
        ConfigError: the model has several inputs, its input cannot be samples of a wave, or settings do not fit
            the input.
    """
    settings = request.settings
    if len(request.inputs) > 1:
        names = ", ".join(port.name for port in request.inputs)
        told = f"the inputs of the model are {names}, but audio files give only one; fix the others or feed outputs "
        told += "of the previous step back to them (+model.kwargs={fix:{INPUT:VALUE},states:{INPUT:OUTPUT}})"
        raise ConfigError("data.source", settings.source, reason=told)
    rank, axis = _NAMED[settings.axes or "nt"]
    port = next(iter(request.inputs), Port(LONE, "float32", (None,) * rank, None if rank == 1 else 0))
    if settings.axes is None and request.inputs:
        axis = _time_axis(port, settings)
    elif not _fits(port, rank, axis):
        allowed = (
            f"null, or the axes of the input {_described(port)}: all but the batch and time must have size 1"
        )
        raise ConfigError("data.axes", settings.axes, allowed)
    frame = _frame(port, axis, settings)
    shape = tuple(frame if place == axis else 1 for place in range(len(port.shape)))
    rate, because = _rate(settings, request.about)
    full = _full(port, settings)
    return WaveInput(port.name, shape, axis, port.dtype, full, rate, settings.hop or frame, because)


def _time_axis(port: Port, settings: DataConfig) -> int:
    """Returns the time axis, found by the sizes of the axes.

    Raises:
        ConfigError: no axis or several axes may be time, or the size of the axis is typical of a spectrum.
    """
    batch = None if len(port.shape) == 1 else port.axis
    left = [place for place, size in enumerate(port.shape) if size != 1 and place != batch]
    if len(left) == 2 and batch is None and left[0] == 0 and port.shape[0] is None:
        del left[0]  # a batch axis whose name differs from that of other inputs
    if len(left) != 1:
        what = "no axis that may be time" if not left else f"{len(left)} axes that may be time"
        told = f"the input {_described(port)} has {what}, but a wave has exactly one; use data=arrays for other arrays"
        named = any(_fits(port, *one) for one in _NAMED.values())
        told += ", or set the time axis with data.axes" if left and named else ""
        raise ConfigError("data.source", settings.source, reason=told)
    size = port.shape[left[0]]
    if size is not None and size > _LEAST_SPECTRUM and not (size - 1) & (size - 2):
        told = f"the input {_described(port)} has {size} values, the size of a spectrum of {2 * (size - 1)} samples"
        told += " rather than of a wave; use data=arrays for spectra, or set data.axes if it is a wave"
        raise ConfigError("data.source", settings.source, reason=told)
    return left[0]


def _fits(port: Port, rank: int, axis: int) -> bool:
    """Returns whether an input has `rank` axes, and all of them except the batch and time may have size 1."""
    others = [size for place, size in enumerate(port.shape) if place not in (axis, port.axis)]
    return len(port.shape) == rank and all(size in (None, 1) for size in others)


def _frame(port: Port, axis: int, settings: DataConfig) -> int:
    fixed = port.shape[axis]
    if fixed is None and settings.frame is None:
        allowed = f"a number of samples, since the input {_described(port)} accepts any length"
        raise ConfigError("data.frame", None, allowed)
    if fixed is not None and settings.frame not in (None, fixed):
        raise ConfigError("data.frame", settings.frame, f"null or {fixed} for the input {_described(port)}")
    return fixed or settings.frame or 1


def _rate(settings: DataConfig, about: Mapping[str, str]) -> tuple[int, str]:
    """Returns the rate in Hz, and a phrase that names its source."""
    if settings.rate is not None:
        return settings.rate, "data.rate"
    for name, value in about.items():
        plain = "".join(one for one in name.lower() if one.isalnum())
        if plain in _RATE_NAMES and value.isdecimal() and int(value) in _RATES:
            return int(value), f"the model's {name}"
    return RATE, "assumed; data.rate sets it"


def _full(port: Port, settings: DataConfig) -> int:
    """Returns the input's value for a sample of 1.0 (full scale)."""
    kind = np.dtype(port.dtype)
    if kind.kind == "f":
        return _INT16 if settings.scale == "int16" else 1
    if kind.kind != "i" or kind.itemsize < 2:
        told = f"the input {_described(port)} is {port.dtype}, but samples of a wave must be floats"
        reason = f"{told} or signed integers of at least 16 bits"
        raise ConfigError("data.source", settings.source, reason=reason)
    if settings.scale == "unit":
        raise ConfigError(
            "data.scale", "unit", f"null or int16 for the input {_described(port)} of type {port.dtype}"
        )
    return _INT16


def _described(port: Port) -> str:
    sizes = [
        "N" if place == port.axis else "any" if size is None else size
        for place, size in enumerate(port.shape)
    ]
    return f"'{port.name}' [{', '.join(map(str, sizes))}]"
