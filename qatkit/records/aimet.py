"""Encodings in the three versions of the format of AIMET (Qualcomm's AI Model Efficiency Toolkit).

    0.6.1   {"activation_encodings": {NAME: [{"bitwidth": 8, "dtype": "int", "is_symmetric": "False",
            "scale": ..., "offset": ..., "min": ..., "max": ...}, ...one per channel]}, "param_encodings": {...}}
    1.0.0   {"activation_encodings": [{"name": NAME, "bw": 8, "dtype": "INT", "enc_type": "PER_TENSOR",
            "is_sym": false, "scale": [...], "offset": [...]}], "param_encodings": [...]}
    2.0.0   {"encodings": [{"name": NAME, "output_dtype": "uint8", "y_scale": ..., "y_zero_point": ..., "axis": 0}]}

An offset is the negative zero point. Up to version 1.0.0 the zero point is that of the unsigned type with the
same number of bits, so the offset is -128 for an int8 tensor with the zero point 0. In these versions
"symmetric" means that the type is signed. Only files of version 2.0.0 contain biases, as in AIMET. Only
encodings of integer types are read and written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qatkit.records.encodings import Encoding, Encodings, made

VERSIONS = ("0.6.1", "1.0.0", "2.0.0")
_GROUPS = ("activation_encodings", "param_encodings")
_BIAS = "int32"


def is_aimet(content: Mapping[str, Any]) -> bool:
    """Returns whether the content of a JSON file is that of AIMET's encodings, of any version."""
    return any(group in content for group in _GROUPS) or isinstance(content.get("encodings"), list)


def from_dict(content: Mapping[str, Any]) -> Encodings:
    """Returns the encodings from a file's content; a note names the skipped entries, which are not of integers.

    Raises:
        KeyError, TypeError, ValueError: an entry is damaged.
    """
    found, floats = Encodings(), []
    for parameter, name, entry in _entries(content):
        one = _read(name, entry)
        if one is None:
            floats.append(name)
        elif parameter or one.axis is not None or one.dtype == _BIAS:
            found.parameters[name] = one
        else:
            found.activations[name] = one
    notes = (f"skipped the encodings that are not of integers: {', '.join(floats)}",) if floats else ()
    return Encodings(found.activations, found.parameters, notes=notes)


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[bool, str, Any]]:
    """Yields (whether the tensor is a parameter, its name, its entry).

    In version 2.0.0, which does not separate parameters, the first value is always False.
    """
    for one in content.get("encodings", ()):
        yield False, one["name"], one
    for group in _GROUPS:
        listed = content.get(group, {})
        pairs = listed.items() if isinstance(listed, dict) else ((one["name"], one) for one in listed)
        for name, one in pairs:
            yield group == _GROUPS[1], name, one


def _read(name: str, entry: Any) -> Encoding | None:
    if isinstance(entry, list):  # version 0.6.1
        return _read_0_6_1(name, entry)
    if "bw" in entry:
        return _read_1_0_0(name, entry)
    dtype = entry["output_dtype"]
    if "int" not in dtype or "y_scale" not in entry:
        return None
    zero = entry.get("y_zero_point")
    axis, size = entry.get("axis"), entry.get("block_size")
    return made(name, dtype, entry["y_scale"], 0 if zero is None else zero, axis, size)


def _read_0_6_1(name: str, entry: list[Mapping[str, Any]]) -> Encoding | None:
    first = entry[0]
    if first["dtype"] != "int":
        return None
    dtype, shift = _grid(int(first["bitwidth"]), str(first["is_symmetric"]) == "True")
    scales, offsets = ([one[key] for one in entry] for key in ("scale", "offset"))
    return _shifted(name, dtype, scales, offsets, shift, per_tensor=len(entry) == 1)


def _read_1_0_0(name: str, entry: Mapping[str, Any]) -> Encoding | None:
    kind = entry["enc_type"]
    if entry["dtype"] != "INT" or kind not in ("PER_TENSOR", "PER_CHANNEL", "PER_BLOCK"):
        return None
    dtype, shift = _grid(int(entry["bw"]), bool(entry["is_sym"]))
    one = kind == "PER_TENSOR"
    size = entry.get("block_size")
    return _shifted(name, dtype, entry["scale"], entry["offset"], shift, per_tensor=one, block_size=size)


def _grid(bits: int, signed: bool) -> tuple[str, int]:
    """Returns the type, and the number by which zero points of the unsigned type with as many bits are larger."""
    return f"{'' if signed else 'u'}int{bits}", 2 ** (bits - 1) if signed else 0


def _shifted(
    name: str,
    dtype: str,
    scales: Any,
    offsets: Any,
    shift: int,
    *,
    per_tensor: bool,
    block_size: int | None = None,
) -> Encoding:
    zeros = -np.asarray(offsets, np.float64) - shift
    if per_tensor:
        return made(name, dtype, np.asarray(scales).reshape(()), zeros.reshape(()))
    return made(name, dtype, scales, zeros, None, block_size)


def left_out(encodings: Encodings, version: str) -> list[str]:
    """Returns the names of the tensors for which a version has no entries."""
    found = [name for name, one in encodings.all.items() if not _has_entry(one, version)]
    return found + list(encodings.formats)


def _has_entry(one: Encoding, version: str) -> bool:
    if one.bits is None or (one.dtype == _BIAS and version != "2.0.0"):
        return False
    return one.block_size is None or version != "0.6.1"


def as_dict(encodings: Encodings, version: str) -> dict[str, Any]:
    """Returns the content of a file.

    Args:
        encodings: the encodings to write, except those of `left_out`.
        version: one of `VERSIONS`.
    """
    without = set(left_out(encodings, version))
    groups = [
        {name: one for name, one in group.items() if name not in without}
        for group in (encodings.activations, encodings.parameters)
    ]
    if version == "2.0.0":
        listed = [_as_2_0_0(name, one) for group in reversed(groups) for name, one in group.items()]
        return {"version": version, "encodings": listed}
    written: list[Any] = []
    for group in groups:
        if version == "0.6.1":
            written.append({name: _as_0_6_1(one) for name, one in group.items()})
        else:
            written.append([_as_1_0_0(name, one) for name, one in group.items()])
    return {"version": version, **dict(zip(_GROUPS, written, strict=True))}


def _offsets(one: Encoding) -> list[float]:
    assert one.bits is not None
    shift = _grid(one.bits, one.signed)[1]
    zeros = _by_channel(one, one.zero_point)
    return [float(-zero - shift) for zero in zeros.reshape(-1).tolist()]


def _by_channel(one: Encoding, values: Any) -> Any:
    """Returns blockwise values with the output channels first, as version 1.0.0 orders them; others unchanged."""
    return values.T if one.block_size is not None and one.axis == 0 and values.ndim == 2 else values


def _as_0_6_1(one: Encoding) -> list[dict[str, Any]]:
    low, high = (_by_channel(one, end).reshape(-1).tolist() for end in one.ends())
    scales = _by_channel(one, one.scale.astype(np.float64)).reshape(-1).tolist()
    rows = zip(low, high, scales, _offsets(one), strict=True)
    same = {"bitwidth": one.bits, "dtype": "int", "is_symmetric": str(one.signed)}
    return [
        {**same, "min": least, "max": most, "scale": scale, "offset": offset}
        for least, most, scale, offset in rows
    ]


def _as_1_0_0(name: str, one: Encoding) -> dict[str, Any]:
    kind = "PER_BLOCK" if one.block_size is not None else "PER_CHANNEL" if one.scale.ndim else "PER_TENSOR"
    found = {
        "name": name,
        "bw": one.bits,
        "dtype": "INT",
        "enc_type": kind,
        "is_sym": one.signed,
        "scale": _by_channel(one, one.scale.astype(np.float64)).reshape(-1).tolist(),
        "offset": _offsets(one),
    }
    return found if one.block_size is None else {**found, "block_size": one.block_size}


def _as_2_0_0(name: str, one: Encoding) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "output_dtype": one.dtype,
        "y_scale": one.scale.astype(np.float64).tolist(),
    }
    if one.zero_point.any():
        found["y_zero_point"] = one.zero_point.tolist()
    if one.axis is not None:
        found["axis"] = one.axis
    if one.block_size is not None:
        found["block_size"] = one.block_size
    return found
