"""Translates to opset 18 the operators that torch's exporter does not know or translates wrongly.

These are our own operators, pools whose windows differ in size, average pools with `divisor_override` (which the
exporter ignores), and some functions of torch that a few ONNX operators can express. The sizes of the batch and of
dynamic axes are unknown.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import onnxscript
import torch

# These modules define the operators that `translations` names.
import qatkit.graph.convert.integer_modules  # noqa: F401
from qatkit.export import scans, suppression, triangular
from qatkit.graph.convert import weight_only_modules
from qatkit.graph.convert.recurrent_modules import of_each

op: Any = onnxscript.opset18  # its own type hints do not allow Python numbers
_FLOAT, _INT32, _INT64 = 1, 6, 7  # the numbers of the types in onnx.TensorProto


def _quantize(x, scale, zero_point):  # type: ignore[no-untyped-def]
    return op.QuantizeLinear(x, scale, zero_point)


def _dequantize(q, scale, zero_point, axis: int):  # type: ignore[no-untyped-def]
    return op.DequantizeLinear(q, scale, zero_point, axis=axis)


def _barrier(x):  # type: ignore[no-untyped-def]
    return op.Sum(x)


def _unpack(held, bits: int):  # type: ignore[no-untyped-def]
    if bits == 8:
        return op.Cast(held, to=_FLOAT)
    table = op.Constant(value=ir.tensor(weight_only_modules.table(bits).numpy()))
    rows = op.Gather(table, op.Cast(held, to=_INT32), axis=0)
    return op.Reshape(rows, [*[0] * (len(held.shape) - 1), -1])


def _in_float(q: Any, scale: Any, zero: Any = None) -> Any:
    counted = op.Cast(q, to=_FLOAT)
    return op.Mul(counted if zero is None else op.Sub(counted, op.Cast(zero, to=_FLOAT)), scale)


def _recurrent(x, weights, bias, hidden, cell, mode: str, size: int):  # type: ignore[no-untyped-def]
    """Translates an LSTM, GRU or RNN layer with int8 weights.

    The weights are dequantized by Cast and Mul, which ONNX Runtime computes once, when it loads the file. It would
    compute a DequantizeLinear in every run.
    """
    given = [x, *(_in_float(*parts) for parts in of_each(weights)), bias, None, hidden]
    both = int(weights[0].shape[0]) == 2
    settings = {"hidden_size": size, "direction": "bidirectional" if both else "forward"}
    if mode == "LSTM":
        found = op.LSTM(*given, cell, **settings)
    elif mode == "GRU":
        found = op.GRU(*given, **settings, linear_before_reset=1)
    else:
        found = op.RNN(*given, **settings, activations=[mode.removeprefix("RNN_").capitalize()] * (1 + both))
    steps, *states = found
    joined = (
        op.Reshape(op.Transpose(steps, perm=[0, 2, 1, 3]), [0, 0, -1]) if both else op.Squeeze(steps, [1])
    )
    return joined, *states, *([] if mode == "LSTM" else states)


def _rrelu(x, noise=None, lower: float = 0.125, upper: float = 1 / 3, training=False, generator=None):  # type: ignore[no-untyped-def]
    """Translates RReLU at inference, where the slope is the mean of its bounds."""
    return op.LeakyRelu(x, alpha=(lower + upper) / 2), op.Identity(noise)


def _spread(value: Any, rank: int) -> list[int]:
    """Returns a list with a number for each of `rank` axes, from such a list or from one number for all axes."""
    found = list(value) if isinstance(value, Sequence) else [value]
    return [int(v) for v in (found * rank if len(found) == 1 else found)]


def _average_pool(rank: int) -> Callable[..., Any]:
    def pool(  # type: ignore[no-untyped-def]
        x,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ):
        kernel, pads = _spread(kernel_size, rank), _spread(padding, rank)
        steps = _spread(stride, rank) if stride else kernel
        if divisor_override is None:
            return op.AveragePool(
                x, ceil_mode=int(ceil_mode), count_include_pad=int(count_include_pad), kernel_shape=kernel,
                pads=pads * 2, strides=steps,
            )  # fmt: skip
        if ceil_mode:
            raise NotImplementedError(
                "an average pool with divisor_override and ceil_mode cannot be expressed in ONNX"
            )
        mean = op.AveragePool(x, count_include_pad=1, kernel_shape=kernel, pads=pads * 2, strides=steps)
        size = torch.Size(kernel).numel()
        return op.Mul(mean, op.CastLike(op.Constant(value_float=size / divisor_override), mean))

    return pool


def _by_axis(x: Any, output_size: Sequence[int], reduce: Callable[..., Any]) -> Any:
    """Computes an adaptive pool from n to m values: output i reduces inputs floor(i·n/m) to ceil((i + 1)·n/m)."""
    rank = len(output_size)
    for i, wanted in enumerate(output_size):
        axis, shape = len(x.shape) - rank + i, x.shape
        if shape[axis] == wanted:
            continue
        if wanted == 1:  # this works for any size
            x = reduce(x, [axis], keepdims=1)
        else:
            size = int(shape[axis])
            ends = [(j * size // wanted, -((-(j + 1) * size) // wanted)) for j in range(wanted)]
            parts = [op.Slice(x, [start], [end], [axis]) for start, end in ends]
            x = op.Concat(*(reduce(part, [axis], keepdims=1) for part in parts), axis=axis)
        x.shape = _with(shape, axis, wanted)
    return x


def _with(shape: Any, axis: int, size: int) -> Any:
    new = shape.copy()
    new[axis] = size
    return new


def _adaptive_average(x, output_size: Sequence[int]):  # type: ignore[no-untyped-def]
    return op.Identity(_by_axis(x, output_size, op.ReduceMean))


def _adaptive_max(x, output_size: Sequence[int]):  # type: ignore[no-untyped-def]
    result = op.Identity(_by_axis(x, output_size, op.ReduceMax))
    return result, op.Cast(result, to=_INT64)  # no node may read these indices (`VALUES_ONLY`)


def _kth(x, k: int, dim: int = -1, keepdim: bool = False):  # type: ignore[no-untyped-def]
    """Translates torch.kthvalue: the k-th smallest value along an axis, and its index."""
    values, places = op.TopK(x, op.Constant(value_ints=[k]), axis=dim, largest=0, sorted=1)
    ends = [k - 1], [k], [dim]
    found = [op.Slice(part, *ends) for part in (values, places)]
    return tuple(part if keepdim else op.Squeeze(part, [dim]) for part in found)


def _sort(x, stable: bool | None = None, dim: int = -1, descending: bool = False):  # type: ignore[no-untyped-def]
    """Translates torch.sort: sorted values and their indices; TopK keeps the order of equal values."""
    return op.TopK(x, op.Gather(op.Shape(x), [dim], axis=0), axis=dim, largest=int(descending), sorted=1)


def _median(x, dim: int, keepdim: bool = False):  # type: ignore[no-untyped-def]
    """Translates torch.median: the median and its index; of two values in the middle, the lower one."""
    return _kth(x, (int(x.shape[dim]) + 1) // 2, dim, keepdim)


def _distances(x, y, p: float, compute_mode: int | None = None):  # type: ignore[no-untyped-def]
    """Translates torch.cdist: the distance between every row of x and every row of y."""
    apart = op.Sub(op.Unsqueeze(x, [-2]), op.Unsqueeze(y, [-3]))
    if p == 1:
        return op.ReduceL1(apart, [-1], keepdims=0)
    if p == 2:
        return op.ReduceL2(apart, [-1], keepdims=0)
    if p == float("inf"):
        return op.ReduceMax(op.Abs(apart), [-1], keepdims=0)
    power = op.CastLike(op.Constant(value_float=p), x)
    return op.Pow(op.ReduceSum(op.Pow(op.Abs(apart), power), [-1], keepdims=0), op.Reciprocal(power))


def _search(boundaries, x, out_int32=False, right=False, side=None, sorter=None):  # type: ignore[no-untyped-def]
    """Translates torch.searchsorted: counts the boundaries below each value, with `right` also those equal to it."""
    if sorter is not None:
        raise NotImplementedError("searchsorted with a sorter is not supported")
    rows = boundaries if len(boundaries.shape) == 1 else op.Unsqueeze(boundaries, [-2])
    column = op.Unsqueeze(x, [-1])
    before = op.LessOrEqual(rows, column) if right or side == "right" else op.Less(rows, column)
    kind = _INT32 if out_int32 else _INT64
    return op.ReduceSum(op.Cast(before, to=kind), [-1], keepdims=0)


def _hypot(x, y):  # type: ignore[no-untyped-def]
    return op.Sqrt(op.Add(op.Mul(x, x), op.Mul(y, y)))


def _atan2(y, x):  # type: ignore[no-untyped-def]
    """Returns the angle of (x, y); the exporter's own translation gives -π if y is 0 and x is negative."""
    zero, half = (op.CastLike(op.Constant(value_float=value), y) for value in (0.0, math.pi))
    angle = op.Atan(op.Div(y, x))
    behind = op.Where(op.Less(y, zero), op.Sub(angle, half), op.Add(angle, half))
    origin = op.And(op.Equal(x, zero), op.Equal(y, zero))
    return op.Where(origin, zero, op.Where(op.Less(x, zero), behind, angle))


def _fmax(x, y):  # type: ignore[no-untyped-def]
    """Returns the larger value, or the number if the other value is NaN."""
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, op.Max(x, y)))


def _fmin(x, y):  # type: ignore[no-untyped-def]
    return op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, op.Min(x, y)))


def _floor_division(a, b):  # type: ignore[no-untyped-def]
    """Divides sizes and rounds down as Python does; ONNX's division rounds towards zero."""
    return op.Div(op.Sub(a, op.Mod(a, b)), b)


# Operators of which ONNX can compute only the first result, the values.
VALUES_ONLY = (torch.ops.aten.adaptive_max_pool2d.default, torch.ops.aten.adaptive_max_pool3d.default)


def translations() -> dict[Callable[..., object], Callable[..., object]]:
    """Returns our translations, each by its torch operator."""
    aten = torch.ops.aten
    return {
        torch.ops.qatkit.quantize.default: _quantize,
        torch.ops.qatkit.dequantize.default: _dequantize,
        torch.ops.qatkit.barrier.default: _barrier,
        torch.ops.qatkit.unpack.default: _unpack,
        torch.ops.qatkit.recurrent.default: _recurrent,
        torch.ops.qatkit.suppress.default: suppression.suppress,
        aten.rrelu_with_noise_functional.default: _rrelu,
        aten.avg_pool2d.default: _average_pool(2),
        aten.avg_pool3d.default: _average_pool(3),
        aten._adaptive_avg_pool3d.default: _adaptive_average,
        aten.adaptive_max_pool2d.default: _adaptive_max,
        aten.adaptive_max_pool3d.default: _adaptive_max,
        aten.kthvalue.default: _kth,
        aten.median.dim: _median,
        aten.sort.stable: _sort,
        aten.searchsorted.Tensor: _search,
        aten._cdist_forward.default: _distances,
        aten.cumprod.default: scans.cumprod,
        aten.cummax.default: scans.cummax,
        aten.cummin.default: scans.cummin,
        aten.logcumsumexp.default: scans.logcumsumexp,
        aten.linalg_solve_triangular.default: triangular.solve_triangular,
        aten.atan2.default: _atan2,
        aten.hypot.default: _hypot,
        aten.fmax.default: _fmax,
        aten.fmin.default: _fmin,
        operator.floordiv: _floor_division,
    }
