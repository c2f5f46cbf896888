"""Computes running products, maxima, minima and log-sums with operators of opset 18.

    x             a  b   c    d
    by 1          a  ab  bc   cd      each value is combined with the previous one
    by 2          a  ab  abc  abcd    each value is combined with the value two places earlier

Each pass doubles the number of values that a result combines, so an axis of size n needs log2 n passes (Hillis and
Steele, "Data parallel algorithms", 1986). The size of the axis must be known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxscript

op: Any = onnxscript.opset18  # its own type hints do not allow Python numbers
_INT64 = 7  # the number of the type in onnx.TensorProto


def _length(x: Any, axis: int) -> int:
    size = x.shape[axis]
    if not isinstance(size, int):
        raise NotImplementedError(
            f"cumprod, cummax, cummin and logcumsumexp need an axis of known size, not {size}"
        )
    return size


def _before(x: Any, by: int, axis: int, fill: Any) -> Any:
    """Returns x shifted by `by` places along an axis; the free places at the beginning become `fill`."""
    pads = [0] * (2 * len(x.shape))
    pads[axis % len(x.shape)] = by
    kept = op.Slice(x, [0], [-by], [axis])
    return op.Pad(kept, op.Constant(value_ints=pads), fill, mode="constant")


def _scan(x: Any, axis: int, fill: Any, join: Callable[[Any, Any], Any]) -> Any:
    by, size, shape = 1, _length(x, axis), x.shape
    while by < size:
        earlier = _before(x, by, axis, fill)
        x = join(earlier, x)
        x.shape = shape
        by *= 2
    return op.Identity(x)


def _number(x: Any, value: float) -> Any:
    return op.CastLike(op.Constant(value_float=value), x)


def cumprod(x, dim: int, dtype: int | None = None):  # type: ignore[no-untyped-def]
    """Translates torch.cumprod: at each position, the product of all values up to it."""
    if dtype is not None:
        shape = x.shape
        x = op.Cast(x, to=dtype)
        x.shape = shape
    return _scan(x, dim, _number(x, 1.0), op.Mul)


def logcumsumexp(x, dim: int):  # type: ignore[no-untyped-def]
    """Translates torch.logcumsumexp: at each position, the logarithm of the sum of exponentials up to it."""

    def join(a: Any, b: Any) -> Any:
        largest = op.Max(a, b)
        origin = op.Where(op.IsInf(largest), _number(largest, 0.0), largest)
        return op.Add(op.Log(op.Add(op.Exp(op.Sub(a, origin)), op.Exp(op.Sub(b, origin)))), origin)

    return _scan(x, dim, _number(x, -float("inf")), join)


def _extreme(x: Any, axis: int, fill: Any, beats: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Returns, for each position, the extreme value up to it and the last index at which this value occurs."""
    size, rank, shape = _length(x, axis), len(x.shape), x.shape
    along = [size if one == axis % rank else 1 for one in range(rank)]
    places = op.Expand(
        op.Reshape(op.Constant(value_ints=list(range(size))), op.Constant(value_ints=along)), op.Shape(x)
    )
    floats = x.dtype.is_floating_point()
    by = 1
    while by < size:
        places.shape = shape
        earlier, earlier_places = (
            _before(x, by, axis, fill),
            _before(places, by, axis, op.Constant(value_int=0)),
        )
        later = beats(x, earlier)
        if floats:  # NaN is more extreme than any number, as in torch
            later = op.Or(later, op.IsNaN(x))
        kind = x.dtype
        x, places = op.Where(later, x, earlier), op.Where(later, places, earlier_places)
        x.shape, x.dtype = shape, kind
        by *= 2
    return op.Identity(x), op.Cast(places, to=_INT64)


def _end(x: Any, *, lowest: bool) -> Any:
    """Returns the smallest or the largest value of the type of x."""
    if x.dtype.is_floating_point():
        return _number(x, -float("inf") if lowest else float("inf"))
    limits = np.iinfo(x.dtype.numpy())
    return op.CastLike(op.Constant(value_int=int(limits.min if lowest else limits.max)), x)


def cummax(x, dim: int):  # type: ignore[no-untyped-def]
    """Translates torch.cummax: at each position, the largest value up to it and its index."""
    return _extreme(x, dim, _end(x, lowest=True), op.GreaterOrEqual)


def cummin(x, dim: int):  # type: ignore[no-untyped-def]
    """Translates torch.cummin: at each position, the smallest value up to it and its index."""
    return _extreme(x, dim, _end(x, lowest=False), op.LessOrEqual)
