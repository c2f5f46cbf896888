"""WAV files, composed of their RIFF chunks, so that tests can damage single fields."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def tone(count: int, pitch: float = 0.05) -> Array:
    """Returns int16 samples of a sine with `pitch` periods per sample."""
    exact: Array = 20000 * np.sin(2 * np.pi * pitch * np.arange(count))
    return exact.round().astype(np.int16)


def riff(
    samples: Array,
    rate: int = 16000,
    *,
    kind: int = 1,
    channels: int = 1,
    length: int | None = None,
    extra: tuple[bytes, bytes] | None = None,
) -> bytes:
    """Returns the bytes of a WAV file.

    Args:
        kind: number of the format.
        length: number of bytes that the header claims; None for the true one.
        extra: name and content of a chunk before the samples.
    """
    data, width = samples.tobytes(), samples.dtype.itemsize
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width * max(channels, 1), 8 * width)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form
    if extra is not None:
        name, content = extra
        chunks += name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
    chunks += b"data" + struct.pack("<I", len(data) if length is None else length) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def wav(path: Path, samples: Array, rate: int = 16000) -> Path:
    """Writes a 16-bit WAV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(riff(samples, rate))
    return path
