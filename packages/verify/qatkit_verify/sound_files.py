"""Reads WAV and FLAC files as float samples of one channel; integers become values in [-1, 1).

    chunks of a WAV file ── integers / 2 ** (bits - 1), or floats, unchanged ───┐
    frames of a FLAC file (package soundfile) ──────────────────────────────────┴── mean of the channels ── [T]

The first bytes tell the kind of file. Both kinds give the same values for the same integers, bit for bit.
"""

from __future__ import annotations

import io
import os
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.pictures import open_regular_file

SUFFIXES = (".wav", ".wave", ".flac")
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# Programs that write into a pipe do not know the total length, and store this length or a larger one.
_UNKNOWN = 0x7FFFF000
_BLOCK = 2**20  # number of samples of a FLAC file that are decoded at a time

Samples = NDArray[np.float32]


class Sound(NamedTuple):
    """The samples of a file.

    Attributes:
        rate: the number of samples per second.
        samples: the samples of one channel, [T].
    """

    rate: int
    samples: Samples


class _Format(NamedTuple):
    kind: int
    channels: int
    rate: int
    width: int  # bytes of a sample


def read_sound(path: str) -> Sound:
    """Reads a WAV or FLAC file.

    Raises:
        OSError: the file does not exist or cannot be opened.
        ValueError: it is not a regular file or has no readable samples; the message says why.
        ImportError: it is a FLAC file, and the package soundfile is missing.
    """
    with open_regular_file(path) as stream:
        start = stream.read(12)
        if not start:
            raise ValueError("empty")
        if start[:4] == b"fLaC":
            stream.seek(0)
            rate, found = _flac(stream)
        elif start[:4] in (b"RIFF", b"RF64") and start[8:] == b"WAVE":
            rate, found = _wav(stream)
        else:
            raise ValueError("neither WAV nor FLAC by its first bytes")
    if not rate:
        raise ValueError("a sampling rate of 0")
    if not len(found):
        raise ValueError("no samples")
    one = found[:, 0] if found.shape[1] == 1 else found.mean(1, dtype=np.float64).astype(np.float32)
    if not np.isfinite(one).all():
        raise ValueError("NaN or infinity among its samples")
    return Sound(rate, one)


def _flac(stream: io.BufferedReader) -> tuple[int, Samples]:
    """Returns the rate and the samples [T, channels]."""
    import soundfile

    try:
        with soundfile.SoundFile(stream) as file:
            parts = list[Samples]()
            while len(part := file.read(_BLOCK, dtype="float32", always_2d=True)):
                parts.append(part)
            rate, channels, length = file.samplerate, file.channels, file.frames
    except soundfile.LibsndfileError as error:
        raise ValueError(f"the FLAC decoder failed: {error.error_string}") from error
    found = np.concatenate(parts) if parts else np.empty((0, channels), np.float32)
    if len(found) < length < 2**60:  # a file of unknown length declares the largest number
        raise ValueError(f"cut off after {len(found):,} of {length:,} samples")
    return int(rate), found


def _wav(stream: io.BufferedReader) -> tuple[int, Samples]:
    """Returns the rate and the samples [T, channels]."""
    form: _Format | None = None
    size, length_64 = os.fstat(stream.fileno()).st_size, None
    while len(head := stream.read(8)) == 8:
        name, length = struct.unpack("<4sI", head)
        here = stream.tell()
        if name == b"ds64":
            length_64 = int.from_bytes(stream.read(16)[8:], "little")
        elif name == b"fmt ":
            form = _format(stream.read(min(length, 40)))
        elif name == b"data":
            if form is None:
                raise ValueError("its samples come before their format")
            if length >= _UNKNOWN and size - here < length:
                length = length_64 or size - here
            if size - here < length:
                raise ValueError(f"cut off after {size - here:,} of {length:,} bytes of samples")
            return form.rate, _values(stream.read(length), form)
        stream.seek(here + length + length % 2)
    raise ValueError("no samples")


def _format(raw: bytes) -> _Format:
    if len(raw) < 16:
        raise ValueError("its format is cut off")
    kind, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", raw)
    if kind == _EXTENSIBLE and len(raw) >= 26:
        (kind,) = struct.unpack_from("<H", raw, 24)
    width = -(-bits // 8)
    if not channels or block != channels * width:
        raise ValueError(f"{channels} channels of {bits} bits in {block} bytes")
    if (kind, width) not in {*((_PCM, one) for one in (1, 2, 3, 4)), (_FLOAT, 4), (_FLOAT, 8)}:
        told = "only PCM of 8 to 32 bits and floats of 32 or 64 bits can be read"
        raise ValueError(f"samples of {bits} bits in format {kind}; {told}")
    return _Format(kind, channels, rate, width)


def _values(raw: bytes, form: _Format) -> Samples:
    """Returns the samples [T, channels]; integers, whose unused bits are the lower ones, end up in [-1, 1)."""
    raw = raw[: len(raw) // (form.channels * form.width) * form.channels * form.width]
    found: NDArray[Any]
    if form.kind == _FLOAT:
        found = np.frombuffer(raw, f"<f{form.width}").astype(np.float32)
    elif form.width == 1:
        found = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    elif form.width == 3:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        found = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    else:
        found = np.frombuffer(raw, f"<i{form.width}").astype(np.float32) / 2 ** (8 * form.width - 1)
    return found.reshape(-1, form.channels).astype(np.float32, copy=False)
