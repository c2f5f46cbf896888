"""Values while a program runs: tensors, or NumPy arrays if they depend only on shapes and constants.

Arrays (sizes, axes, pads) do not appear in the recorded graph. They become tensors when they are combined with tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qatkit.importing.operators.table import Array, UnsupportedError, Value

# PyTorch types by the ONNX type (TensorProto.DataType); all float types become float32.
TYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.int32, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float32, 11: torch.float32, 12: torch.int64, 13: torch.int64, 16: torch.float32,
}  # fmt: skip
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


def array(value: Any) -> Array:
    """Returns a constant as an array of a type that PyTorch has; all float types become float32.

    Raises:
        UnsupportedError: the constant contains strings.
    """
    found = np.asarray(value)
    if found.dtype.kind in "OUS":
        raise UnsupportedError("strings have no PyTorch equivalent")
    if found.dtype.kind == "f" or found.dtype.name in ("bfloat16",):
        return found.astype(np.float32)
    return found.astype(_WIDER.get(found.dtype, found.dtype))


def tensor(value: Value, like: Tensor | None = None) -> Tensor:
    """Returns a value as a tensor, on the device of `like`.

    An array of several equal values is made by `torch.full`, and integers at equal distances by `torch.arange`. If
    their number depends on the batch size, these recorded calls can follow it, but a recorded constant could not.

    Raises:
        UnsupportedError: the value is None, which is an omitted input.
    """
    if isinstance(value, Tensor):
        return value
    if value is None:
        raise UnsupportedError("an input is missing")
    device = None if like is None else like.device
    if value.size > 1 and (value == value.flat[0]).all():
        kind = torch.from_numpy(value.reshape(-1)[:1].copy()).dtype
        return torch.full(tuple(map(int, value.shape)), value.flat[0].item(), dtype=kind, device=device)
    if value.size > 1 and value.dtype.kind in "iu" and (step := _distance(value)):
        first, last = int(value.flat[0]), int(value.flat[-1])
        kind = torch.from_numpy(value.reshape(-1)[:1].copy()).dtype
        made = torch.arange(first, last + step, step, dtype=kind, device=device)
        return made if value.ndim == 1 else made.reshape(value.shape)
    return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)).to(device)


def _distance(value: Array) -> int:
    """Returns the distance of consecutive integers in memory order if it is constant, otherwise 0."""
    steps = np.diff(value.reshape(-1).astype(np.int64))
    return int(steps[0]) if (steps == steps[0]).all() else 0


def operand(value: Value, other: Tensor) -> Tensor | float | int | bool:
    """Returns an operand of an arithmetic operator: a tensor, or a number for an array with one value.

    Such an array remains a tensor if it has more axes than `other`, since it then changes the shape of the result.
    """
    if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= other.ndim:
        number: float | int | bool = value.item()
        return number
    return tensor(value, other)


def ints(value: Value) -> list[int]:
    """Returns axes, sizes or pads as integers, and [] for None.

    A tensor's values are read, which is impossible while a graph is recorded.
    """
    if value is None:
        return []
    listed = value.tolist() if isinstance(value, Tensor) else np.asarray(value).tolist()
    flat = listed if isinstance(listed, list) else [listed]
    return [int(one) for one in flat]


def one_int(value: Value) -> int:
    """Returns the only integer of a value."""
    return ints(value)[0]


def axes_of(axes: list[int], rank: int) -> list[int]:
    """Returns axes counted from the front."""
    return [axis % rank for axis in axes]


def sizes_of(value: Value) -> list[int]:
    """Returns the shape of a value."""
    return list(value.shape) if isinstance(value, Tensor) else list(np.shape(np.asarray(value)))
