"""ONNX Runtime's uint8 x int8 operators in NumPy, exactly and as a processor without VNNI computes them.

    QLinearConv, QLinearMatMul, QGemm, MatMulIntegerToFloat of an optimized graph, with constant int8 weights

Each is a product of matrices (`qatkit.verify.avx2`), zero points and bias in 32 bits, and one rounding to the output's
integers or one multiplication to floats: float32 operations in ONNX Runtime's order, so that the exact form is equal
to ONNX Runtime's in every bit (docs/onnxruntime-qdq.md, section 5). A depthwise convolution multiplies in 32 bits
everywhere and is none of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from qatkit.verify.avx2 import Bytes, Integers, PairedWeight
from qatkit.verify.graph_view import constant, operand

Array = NDArray[Any]

_AT_ONCE = 2**20  # values of a matrix of columns
# Where each operator has its operands: x scale, x zero point, weight, its scale and zero point, bias, y scale and zero.
_OPERANDS = {
    "QLinearConv": (1, 2, 3, 4, 5, 8, 6, 7),
    "QLinearMatMul": (1, 2, 3, 4, 5, None, 6, 7),
    "QGemm": (1, 2, 3, 4, 5, 6, 7, 8),
    "MatMulIntegerToFloat": (2, 4, 1, 3, 5, 6, None, None),
}


@dataclass(frozen=True)
class Window:
    """How a convolution looks at its input.

    Attributes:
        kernel, strides, dilations: a number an axis.
        pads: before all axes, then behind all.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]

    def columns(self, x: Bytes, fill: int) -> tuple[Bytes, tuple[int, ...]]:
        """The columns [K, N * places] of channels [N, C, ...], and the places' shape: K runs over kernel, then C."""
        rank = len(self.kernel)
        pads = [(0, 0), (0, 0), *zip(self.pads[:rank], self.pads[rank:], strict=True)]
        padded = np.pad(x, pads, constant_values=fill)
        spread = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]
        seen = sliding_window_view(padded, spread, axis=tuple(range(2, 2 + rank)))
        every = [slice(None, None, step) for step in (*self.strides, *self.dilations)]
        seen = seen[(slice(None), slice(None), *every)]
        places = seen.shape[2 : 2 + rank]
        order = (*range(2 + rank, 2 + 2 * rank), 1, 0, *range(2, 2 + rank))
        return seen.transpose(order).reshape(-1, len(x) * int(np.prod(places))), places


@dataclass(frozen=True)
class Int8Kernel:
    """One operator with its constants.

    Attributes:
        name: what people are told, of the node of the file that it was made of.
        weights: one of each group, one alone but for convolutions.
        input_zero, weight_zero: zero points.
        scale: float32 [channels] or []: from sums to the output's steps, or to floats.
        bias: int32 [channels] onto the sums; floats, onto the output, where that is float.
        output_zero: the output's zero point, of its type; None where the output is float.
        window: of a convolution.
    """

    name: str
    weights: tuple[PairedWeight, ...]
    input_zero: int
    weight_zero: int
    scale: NDArray[np.float32]
    bias: Array | None
    output_zero: Array | None
    window: Window | None

    @property
    def channels(self) -> int:
        """Of the output."""
        return sum(len(weight.values) for weight in self.weights)

    @property
    def overflowing(self) -> int:
        """The channels that some input makes saturate; of the others, and of all inputs, the weights prove it."""
        return sum(int(weight.overflowing.any(1).sum()) for weight in self.weights)

    @property
    def can_saturate(self) -> bool:
        """Whether any input makes it saturate."""
        return self.overflowing > 0

    def __call__(self, x: Bytes, *, saturate: bool) -> Array:
        """The output for an input as it is stored, exact or as without VNNI."""
        parts = (self._sums(part, clip=saturate) for part in self._parts(x))
        return np.concatenate([self.finish(e if c is None else e + c) for e, c in parts])

    def both(self, x: Bytes) -> Iterator[tuple[Integers, Array, Array]]:
        """A few images at a time: what clipping adds to the sums, the exact output and the emulated one."""
        for part in self._parts(x):
            exact, clipped = self._sums(part, clip=True)
            assert clipped is not None, "asked for"
            yield clipped, self.finish(exact), self.finish(exact + clipped)

    def _parts(self, x: Bytes) -> Iterator[Bytes]:
        """As many images, or rows, as have their columns in the processor's caches."""
        each = max(1, x[0].size) * math.prod(self.window.kernel if self.window is not None else ())
        count = max(1, _AT_ONCE // each)
        return (x[i : i + count] for i in range(0, len(x), count))

    def _sums(self, x: Bytes, *, clip: bool) -> tuple[Integers, Integers | None]:
        """The exact sums without bias, and what clipping adds to them where it is asked for."""
        if self.window is None:
            columns = [np.ascontiguousarray(x.reshape(-1, x.shape[-1]).T)]
            shape: tuple[int, ...] = (*x.shape[:-1], -1)
        else:
            channels = np.split(x, len(self.weights), axis=1)
            seen = [self.window.columns(one, self.input_zero) for one in channels]
            columns, shape = [one for one, _ in seen], (-1, len(x), *seen[0][1])

        def assembled(groups: Iterator[Integers]) -> Integers:
            found = np.concatenate(list(groups))
            return found.T.reshape(shape) if self.window is None else found.reshape(shape).swapaxes(0, 1)

        pairs = list(zip(self.weights, columns, strict=True))
        exact = assembled(self._exact(weight, one) for weight, one in pairs)
        return exact, assembled(weight.clipped(one) for weight, one in pairs) if clip else None

    def _exact(self, weight: PairedWeight, columns: Bytes) -> Integers:
        of_channels = weight.values.sum(1, dtype=np.int32) - self.weight_zero * len(columns)
        exact = weight.products(columns) - self.input_zero * of_channels[:, None]
        if self.weight_zero:
            exact -= self.weight_zero * columns.sum(0, dtype=np.int32)
        return np.asarray(exact)

    def finish(self, sums: Integers) -> Array:
        """The output of such sums."""
        axes = () if self.window is None else (1,) * len(self.window.kernel)
        scale, bias = self.scale.reshape(-1, *axes), self.bias
        if bias is not None and bias.dtype == np.int32:
            sums, bias = sums + bias.reshape(-1, *axes), None
        scaled = sums.astype(np.float32) * scale
        if self.output_zero is None:
            return np.asarray(scaled if bias is None else scaled + bias)
        ends, zero = np.iinfo(self.output_zero.dtype), int(self.output_zero)
        return np.asarray(np.clip(np.rint(scaled), ends.min - zero, ends.max - zero) + zero, ends.dtype)


def int8_kernel(node: ir.Node, name: str) -> Int8Kernel | None:
    """What a node of an optimized graph multiplies in uint8 x int8; None for all others, depthwise ones too."""
    if node.op_type not in _OPERANDS:
        return None
    x_scale, x_zero, weight, w_scale, w_zero, bias, y_scale, y_zero = (
        None if at is None else constant(operand(node, at)) for at in _OPERANDS[node.op_type]
    )
    if x_zero is None or x_zero.dtype != np.uint8 or weight is None or weight.dtype != np.int8:
        return None
    assert x_scale is not None and w_scale is not None, "scales are constants wherever zero points are"
    window, groups = None, [weight.T if not node.attributes.get_int("transB", 0) else weight]
    if node.op_type == "QLinearConv":
        count = node.attributes.get_int("group", 1)
        if count > 1 and weight.shape[0] == count and weight.shape[1] == 1:
            return None
        window = _window(node, weight.shape[2:])
        rows = np.moveaxis(weight, 1, -1).reshape(len(weight), -1)  # [M, kernel * C]
        groups = np.split(rows, count)
    scale = x_scale * w_scale
    return Int8Kernel(
        name,
        tuple(PairedWeight(np.ascontiguousarray(one)) for one in groups),
        int(x_zero),
        0 if w_zero is None else int(w_zero.flat[0]),
        np.asarray(scale if y_scale is None else scale / y_scale, np.float32),
        bias,
        y_zero,
        window,
    )


def _window(node: ir.Node, kernel: tuple[int, ...]) -> Window:
    rank = len(kernel)
    strides, dilations, pads = (
        tuple(node.attributes.get_ints(name, default) or default)
        for name, default in (("strides", (1,) * rank), ("dilations", (1,) * rank), ("pads", (0,) * 2 * rank))
    )
    return Window(kernel, strides, dilations, pads)
