"""Encodings: the scales and zero points of a quantized file by tensor name, converted to and from JSON.

    {"format": "qatkit.encodings", "version": 1, "file": "model.int8.onnx",
     "activations": {"relu_1": {"dtype": "uint8", "scale": 0.02, "zero_point": 0, "rmin": 0.0, "rmax": 5.1,
                                "node": "relu_1_QuantizeLinear"}},
     "parameters": {"conv.weight": {"dtype": "int8", "scale": [...], "zero_point": [...], "axis": 0, ...}},
     "formats": {"y": "mxint8"}}

A float32 scale is written as the double of the same value, whose shortest decimal form in JSON restores it
bit for bit. `rmin` and `rmax` are derived from the other entries and are not read. This module needs neither
torch nor onnx.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.errors import ConfigError, one_line

FORMAT, VERSION = "qatkit.encodings", 1
# The largest values of types other than integers.
_LARGEST = {"float8e4m3fn": 448.0, "float8e5m2": 57344.0, "float4e2m1": 6.0}
_INTEGER = re.compile(r"(u?)int(\d+)")


@dataclass(frozen=True, eq=False)
class Encoding:
    """The quantization of one tensor.

    Attributes:
        dtype: the ONNX name of the type, such as uint8, int4 or float8e4m3fn.
        scale: the scales, float32: rank 0 for one scale per tensor, [channels], or one per block.
        zero_point: the zero points, int64, with the shape of `scale`.
        axis: the axis of the channels or of the blocks; None if there is none or the source does not name it.
        block_size: the number of values in a block.
        node: the node that quantizes or dequantizes the tensor in the file that this was read from.
    """

    dtype: str
    scale: NDArray[np.float32]
    zero_point: NDArray[np.int64]
    axis: int | None = None
    block_size: int | None = None
    node: str = ""

    @property
    def bits(self) -> int | None:
        """The number of bits of an integer type; None for other types."""
        found = _INTEGER.fullmatch(self.dtype)
        return None if found is None else int(found[2])

    @property
    def signed(self) -> bool:
        """The signedness of the type: True if it can represent negative values."""
        return not self.dtype.startswith("uint")

    @property
    def granularity(self) -> str:
        """The granularity of the scales as text."""
        if self.block_size is not None:
            return f"blocks of {self.block_size}"
        return "per channel" if self.scale.ndim else "per tensor"

    def ends(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the smallest and the largest representable value, each with the shape of `scale`."""
        low, high = _type_ends(self.dtype)
        scale = self.scale.astype(np.float64)
        return (low - self.zero_point) * scale, (high - self.zero_point) * scale

    def equals(self, other: Encoding) -> bool:
        """Returns whether both encodings have the same type, scales and zero points, bit for bit."""
        return (
            self.dtype == other.dtype
            and self.scale.shape == other.scale.shape
            and self.scale.tobytes() == other.scale.tobytes()
            and bool((self.zero_point == other.zero_point).all())
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry of the encoding for a JSON file."""
        low, high = self.ends()
        found = {
            "dtype": self.dtype,
            "scale": self.scale.astype(np.float64).tolist(),
            "zero_point": self.zero_point.tolist(),
            "axis": self.axis,
            "block_size": self.block_size,
            "rmin": low.tolist(),
            "rmax": high.tolist(),
            "node": self.node,
        }
        return {key: value for key, value in found.items() if value not in (None, "")}


@dataclass(frozen=True)
class Encodings:
    """The encodings of a file.

    Attributes:
        activations: the encodings of activations by tensor name.
        parameters: the encodings of weights and biases by tensor name.
        formats: the names of number formats by tensor name, for tensors that a function of the domain `qatkit`
            rounds to a number format. Such tensors have no zero point.
        notes: notes on quantized tensors of the file that are not listed.
    """

    activations: dict[str, Encoding] = field(default_factory=dict)
    parameters: dict[str, Encoding] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def all(self) -> dict[str, Encoding]:
        """The activations and parameters by name."""
        return self.activations | self.parameters

    def as_dict(self, file: str) -> dict[str, Any]:
        """Returns the content of a JSON file.

        Args:
            file: the name of the file to which the encodings belong.
        """
        return {
            "format": FORMAT,
            "version": VERSION,
            "file": file,
            "activations": {name: one.as_dict() for name, one in self.activations.items()},
            "parameters": {name: one.as_dict() for name, one in self.parameters.items()},
            "formats": self.formats,
            "notes": list(self.notes),
        }


def encodings_from(path: Path, key: str) -> Encodings:
    """Returns the encodings of a JSON file in this project's format or in AIMET's (`qatkit.records.aimet`).

    Args:
        path: the path of the file.
        key: the configuration key that names it.

    Raises:
        ConfigError: the file can't be read, has another format or version, or has a damaged entry.
    """
    allowed = "a JSON file of mode=encodings or of AIMET, or a quantized ONNX file"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(key, path, f"{allowed} ({one_line(error)})") from error
    from qatkit.records import aimet

    if isinstance(content, dict) and content.get("format") == FORMAT and content.get("version") != VERSION:
        reason = f"the file has version {content.get('version')}, but only version {VERSION} can be read"
        raise ConfigError(key, path, reason=reason)
    try:
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return _from_dict(content)
        if isinstance(content, dict) and aimet.is_aimet(content):
            return aimet.from_dict(content)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        reason = f"an entry is damaged ({type(error).__name__}: {one_line(error)})"
        raise ConfigError(key, path, reason=reason) from error
    raise ConfigError(key, path, allowed)


def _from_dict(content: Mapping[str, Any]) -> Encodings:
    activations, parameters = (
        {name: _entry(name, one) for name, one in content.get(group, {}).items()}
        for group in ("activations", "parameters")
    )
    return Encodings(activations, parameters, dict(content.get("formats", {})))


def _entry(name: str, one: Mapping[str, Any]) -> Encoding:
    zero = one.get("zero_point", 0)
    return made(
        name, one["dtype"], one["scale"], zero, one.get("axis"), one.get("block_size"), one.get("node", "")
    )


def made(
    name: str,
    dtype: str,
    scale: Any,
    zero_point: Any,
    axis: int | None = None,
    block_size: int | None = None,
    node: str = "",
) -> Encoding:
    """Returns an encoding after checking its values.

    Args:
        name: the name of the tensor, for messages.
        dtype, axis, block_size, node: see `Encoding`.
        scale: the scales, a number or nested lists.
        zero_point: the zero points in the shape of `scale`, or one number for all.

    Raises:
        ValueError: the type is unknown, a scale is not a positive number, a zero point is not an integer in the type's
            range, or the numbers of scales and zero points differ.
    """
    low, high = _type_ends(dtype)
    scales = np.asarray(scale, np.float32)
    zeros = np.asarray(zero_point, np.float64)
    if not (np.isfinite(scales) & (scales > 0)).all() or not scales.size:
        raise ValueError(f"'{name}': expected scales above 0")
    if (zeros % 1 != 0).any() or (zeros < low).any() or (zeros > high).any():
        raise ValueError(f"'{name}': expected zero points that are integers of {dtype}")
    zeros = np.broadcast_to(zeros, scales.shape) if zeros.size == 1 else zeros
    if zeros.shape != scales.shape:
        raise ValueError(f"'{name}': expected as many zero points as scales")
    return Encoding(dtype, scales, zeros.astype(np.int64), axis, block_size, node)


def _type_ends(dtype: str) -> tuple[float, float]:
    if dtype in _LARGEST:
        return -_LARGEST[dtype], _LARGEST[dtype]
    found = _INTEGER.fullmatch(dtype)
    if found is None:
        raise ValueError(f"unknown type {dtype}")
    levels = 2 ** int(found[2])
    return (0, levels - 1) if found[1] else (-levels // 2, levels // 2 - 1)
