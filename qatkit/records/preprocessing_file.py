"""The preprocessing in the model.json next to an ONNX file. It is not trusted, so each value is checked.

A model.json without "preprocessing" belongs to another tool and is ignored. This module does not need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qatkit.records.run_files import INTERPOLATIONS, MODEL_FILE
from qatkit_verify.errors import ConfigError, as_typed, counted, did_you_mean, one_line
from qatkit_verify.fitting import ALIGNMENTS, FITS, LAYOUTS, ORDERS, PIXELS, are_sides, covers
from qatkit_verify.untrusted import read_json

_LARGEST_SIDE, _LARGEST, _LEAST = 2**16, 1e6, 1e-6  # limits: pixels; mean and std, far from float32's limits
_COUNT = f"an integer from 1 to {_LARGEST_SIDE}"
_SIDE = f"{_COUNT}, or [height, width]"


_OF_RECORDINGS, _OF_ARRAYS = "features", "arrays"  # keys that only recordings, or only arrays by name, have


def preprocessing_beside(onnx_file: Path) -> dict[str, Any] | None:
    """Returns the image preprocessing in the model.json next to a file (for `Preprocessing.from_dict`).

    Returns:
        None if there is none, it belongs to another tool, or it describes recordings or arrays by name.

    Raises:
        ConfigError: the file is not JSON, or a value of its preprocessing cannot be used; the message names
            the key.
    """
    found = _beside(onnx_file)
    if found is None or _OF_RECORDINGS in found or _OF_ARRAYS in found:
        return None
    _check(onnx_file.parent / MODEL_FILE, found)
    return found


def recordings_beside(onnx_file: Path) -> dict[str, Any] | None:
    """Returns the preprocessing of recordings in the model.json next to a file; None if it describes none.

    Raises:
        ConfigError: the file is not JSON, or the file or its preprocessing is not an object.
    """
    found = _beside(onnx_file)
    return found if found is not None and _OF_RECORDINGS in found else None


def _beside(onnx_file: Path) -> dict[str, Any] | None:
    path = onnx_file.parent / MODEL_FILE
    if not path.exists():
        return None
    try:
        about = read_json(path)
    except (OSError, ValueError) as error:
        reason = f"the file cannot be read as JSON ({one_line(error)}); correct or move it"
        raise ConfigError(MODEL_FILE, path, reason=reason) from error
    if not isinstance(about, dict):
        raise _refused(path, "", about, "an object with preprocessing")
    if "preprocessing" not in about:
        return None
    found = about["preprocessing"]
    if not isinstance(found, dict):
        raise _refused(path, "preprocessing", found, f"an object with {', '.join(_FIELDS)}")
    return found


def _check(path: Path, found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        if key not in _FIELDS:
            reason = f"the key does not exist{did_you_mean(key, _FIELDS)}; correct or move {path}"
            raise ConfigError(f"{MODEL_FILE}: preprocessing.{key}", _shown(value), reason=reason)
    for key, (expected, is_right) in _FIELDS.items():
        if key not in found and key in _OPTIONAL:
            continue
        if key not in found or not is_right(found[key]):
            raise _refused(path, f"preprocessing.{key}", found.get(key, "(missing)"), expected)
    channels, size = len(found["mean"]), found["image_size"]
    joined = [
        ("resize", covers(found["resize"], size), f"at least image_size ({size})"),
        ("std", len(found["std"]) == channels, f"{counted(channels, 'number')}, as in mean"),
        (
            "channels",
            found.get("channels", channels) == channels,
            f"{channels}, the number of values in mean",
        ),
        (
            "channel_order",
            channels == 3 or found.get("channel_order") != "BGR",
            "RGB, unless mean has 3 numbers",
        ),
    ]
    for key, fits, expected in joined:
        if not fits:
            raise _refused(path, f"preprocessing.{key}", found[key], expected)


def _refused(path: Path, key: str, value: object, expected: str) -> ConfigError:
    name = f"{MODEL_FILE}: {key}" if key else MODEL_FILE
    return ConfigError(name, _shown(value), f"{expected}; correct or move {path}")


def _shown(value: object) -> str:
    try:
        return as_typed(value)
    except RecursionError:
        return "(nested deeply)"


def _is_size(value: object) -> bool:
    return are_sides(value, _LARGEST_SIDE)


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST_SIDE


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number in the range; False for NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _are_numbers(value: object, least: float = -_LARGEST) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(_is_number(one) and one >= least for one in value)


def _are_positive(value: object) -> bool:
    return _are_numbers(value, _LEAST)


def _one_of(values: Sequence[str]) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values


# The allowed values of each key. `channels` is the length of mean.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "image_size": (_SIDE, _is_size),
    "resize": (_SIDE, _is_size),
    "mean": (f"a list of numbers from {-_LARGEST:.0f} to {_LARGEST:.0f}, one per channel", _are_numbers),
    "std": (f"a list of positive numbers from {_LEAST:g} to {_LARGEST:.0f}, one per channel", _are_positive),
    "interpolation": _one_of(INTERPOLATIONS),
    "upright": ("true or false", lambda value: isinstance(value, bool)),
    "channels": (_COUNT, _is_count),
    "fit": _one_of(FITS),
    "pad_value": ("a number from 0 to 255", lambda value: _is_number(value) and 0 <= value <= 255),
    "align": _one_of(ALIGNMENTS),
    "channel_order": _one_of([order.upper() for order in ORDERS]),
    "layout": _one_of([layout.upper() for layout in LAYOUTS]),
    "pixels": _one_of(PIXELS),
}
# Keys that have a default, or that older files do not have.
_OPTIONAL = ("upright", "channels", "fit", "pad_value", "align", "channel_order", "layout", "pixels")
