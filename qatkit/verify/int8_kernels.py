"""Computes ONNX Runtime's uint8 x int8 operators in NumPy, exactly or as on a processor without VNNI.

    QLinearConv, QLinearMatMul, QGemm, MatMulIntegerToFloat, MatMulInteger, DynamicQuantizeMatMul

The operators come from an optimized graph and have constant int8 weights. Each is a matrix product
(`qatkit.verify.avx2`) with zero points and bias in 32 bits, followed by one rounding to the output's integers
or one multiplication to floats. The float32 operations are in ONNX Runtime's order, so the exact results
equal ONNX Runtime's with VNNI bit for bit (docs/onnxruntime-qdq.md, section 5). Scales and zero points may be
computed, as for dynamically quantized activations. Depthwise convolutions are not included, since they
multiply in 32 bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qatkit.verify.avx2 import Bytes, Integers, PairedWeight
from qatkit.verify.graph_view import constant, operand
from qatkit.verify.windows import Window, window_of
from qatkit_verify.int8_operators import PLACES
from qatkit_verify.pairs import convolution_rows, product_rows

Array = NDArray[Any]
Read = Callable[[ir.Value | None], Array | None]

_AT_ONCE = 2**20  # maximum number of values in a matrix of columns


# Input positions of scales, bias and output zero point; `PLACES` has those of zero points and weight.
_SCALES = {
    "QLinearConv": {"x_scale": 1, "w_scale": 4, "bias": 8, "y_scale": 6, "y_zero": 7},
    "QLinearMatMul": {"x_scale": 1, "w_scale": 4, "y_scale": 6, "y_zero": 7},
    "QGemm": {"x_scale": 1, "w_scale": 4, "bias": 6, "y_scale": 7, "y_zero": 8},
    "MatMulIntegerToFloat": {"x_scale": 2, "w_scale": 3, "bias": 6},
    "MatMulInteger": {},
    "DynamicQuantizeMatMul": {"w_scale": 2, "bias": 4},
}
EMULATED = frozenset(_SCALES)


@dataclass(frozen=True)
class Judged:
    """An operator that multiplies uint8 by constant int8 weights.

    Attributes:
        name: the name for messages: that of the node of the file from which the operator was made.
        channels: the number of output channels.
        overflowing: the number of channels that saturate for some input; the weights prove that the others
            never do.
    """

    name: str
    channels: int
    overflowing: int

    @property
    def can_saturate(self) -> bool:
        """Returns whether there are inputs for which the operator saturates."""
        return self.overflowing > 0


@dataclass(frozen=True)
class Numbers:
    """The zero points, scale and bias that surround the integer product.

    Attributes:
        input_zero: the input's zero point.
        weight_zero: the zero point of each output channel, int32.
        scale: the factor, float32 [channels] or [], that turns sums into steps of the output or into floats.
            None: the sums are the output.
        bias: the bias: int32 [channels], which is added to the sums (for a QGemm also [rows or 1, channels or
            1]), or floats, which are added to a float output.
        output_zero: the output's zero point, in its type; None if the output is float or consists of sums.
    """

    input_zero: int
    weight_zero: Integers
    scale: NDArray[np.float32] | None = None
    bias: Array | None = None
    output_zero: Array | None = None

    @classmethod
    def of(cls, node: ir.Node, channels: int, read: Read) -> Numbers | None:
        """Reads the numbers of a node; returns None if one of them is not known yet."""
        zeros = PLACES[node.op_type]
        places = {"x_zero": zeros.x_zero, "w_zero": zeros.weight_zeros[0], **_SCALES[node.op_type]}
        found: dict[str, Array | None] = {}
        for name in ("x_scale", "x_zero", "w_scale", "w_zero", "bias", "y_scale", "y_zero"):
            place = places.get(name)
            value = None if place is None else operand(node, place)
            found[name] = read(value)
            if value is not None and found[name] is None:
                return None
        zero, w_zero, w_scale = found["x_zero"], found["w_zero"], found["w_scale"]
        scale = w_scale
        if w_scale is not None and found["x_scale"] is not None:
            alpha = node.attributes.get_float("alpha", 1.0) if node.op_type == "QGemm" else 1.0
            scale = np.float32(alpha) * found["x_scale"].reshape(()) * w_scale.reshape(-1)
        if scale is not None and found["y_scale"] is not None:
            scale = scale / found["y_scale"].reshape(())
        bias = found["bias"]
        if bias is not None and (bias.ndim != 2 or node.op_type != "QGemm"):
            bias = bias.reshape(-1)  # also from [1, 1, N]
        return cls(
            0 if zero is None else int(zero.reshape(())),
            np.broadcast_to(np.int32(0) if w_zero is None else w_zero.astype(np.int32).reshape(-1), channels),
            None if scale is None else np.asarray(scale, np.float32),
            bias,
            None if found["y_zero"] is None else found["y_zero"].reshape(()),
        )


@dataclass(frozen=True)
class Int8Kernel(Judged):
    """An operator that NumPy computes here.

    Attributes:
        node: the node of the optimized graph.
        weights: the weights, one per group of a convolution or per matrix of a stack; else a single one.
        numbers: the numbers around the product; None until the nodes that compute them have run (`bound`).
        window: the window of a convolution; None for a matrix product.
        stack: the sizes of a weight's axes before its last two.
    """

    node: ir.Node
    weights: tuple[PairedWeight, ...]
    numbers: Numbers | None
    window: Window | None
    stack: tuple[int, ...] = ()

    def bound(self, read: Read) -> tuple[Int8Kernel, Array]:
        """Returns the kernel with all its numbers, and its input in bytes; `read` returns computed tensors."""
        x, numbers = read(operand(self.node, 0)), self.numbers or Numbers.of(self.node, self.channels, read)
        assert x is not None and numbers is not None, "what is read has been computed"
        if self.node.op_type == "DynamicQuantizeMatMul":
            x, scale, zero = dynamically_quantized(x)
            assert numbers.scale is not None, "the scale of the weight"
            numbers = replace(numbers, input_zero=zero, scale=scale * numbers.scale)
        return replace(self, numbers=numbers), x

    @property
    def settled(self) -> Numbers:
        """The numbers, which must be known already."""
        assert self.numbers is not None, "bound first"
        return self.numbers

    def __call__(self, x: Array, *, saturate: bool) -> Array:
        """Returns the output for an input as stored, exact or as computed without VNNI."""
        shaped = self._arranged(x)
        parts = [self._part(weights, one, clip=saturate) for weights, one in self._parts(shaped)]
        return self._restored([self.finish(e if c is None else e + c) for e, c in parts], x, shaped)

    def both(self, x: Array) -> Iterator[tuple[Integers, Array, Array]]:
        """Yields, a few images at a time, what clipping adds to the sums, and the exact and emulated outputs."""
        for weights, part in self._parts(self._arranged(x)):
            exact, clipped = self._part(weights, part, clip=True)
            assert clipped is not None, "asked for"
            yield clipped, self.finish(exact), self.finish(exact + clipped)

    def _arranged(self, x: Array) -> Array:
        """Returns images [N, C, ...], or matrices [..., M, K] with the axes of the weight's stack."""
        if self.window is not None:
            return np.moveaxis(x, -1, 1) if _channels_last(self.node) else x
        if self.node.op_type == "QGemm" and self.node.attributes.get_int("transA", False):
            x = x.T
        if x.ndim == 1:
            x = x[None]
        shape = np.broadcast_shapes(x.shape[:-2], self.stack)
        return np.broadcast_to(x, (*shape, *x.shape[-2:]))

    def _parts(self, x: Array) -> Iterator[tuple[tuple[PairedWeight, ...], Array]]:
        """Yields the weights and the images or rows, in parts whose columns fit the caches."""
        if self.stack:
            order = np.broadcast_to(np.arange(len(self.weights)).reshape(self.stack), x.shape[:-2])
            for place in np.ndindex(order.shape):
                yield (self.weights[order[place]],), x[place]
            return
        if self.window is None:
            x = x.reshape(-1, x.shape[-1])
        each = math.prod(x.shape[1:]) * math.prod(self.window.kernel if self.window is not None else ())
        bias = self.settled.bias
        of_rows = self.window is None and bias is not None and bias.ndim == 2 and len(bias) > 1
        count = len(x) if of_rows else _AT_ONCE // max(1, each)
        for start in range(0, max(1, len(x)), max(1, count)):
            yield self.weights, x[start : start + max(1, count)]

    def _restored(self, parts: list[Array], x: Array, shaped: Array) -> Array:
        found = np.concatenate(parts) if parts else np.zeros((0, self.channels), np.float32)
        if self.window is not None:
            return np.moveaxis(found, 1, -1) if _channels_last(self.node) else found
        columns = found.shape[-1]
        axes = (*shaped.shape[:-1], columns) if x.ndim > 1 else (*shaped.shape[:-2], columns)
        vector = (
            len(getattr(operand(self.node, PLACES[self.node.op_type].weights[0]), "shape", None) or (0, 0))
            == 1
        )
        return found.reshape(axes[:-1] if vector else axes)

    def _part(
        self, weights: tuple[PairedWeight, ...], x: Array, *, clip: bool
    ) -> tuple[Integers, Integers | None]:
        """Returns the exact sums without bias, and what clipping adds to them if requested."""
        if self.window is None:
            columns = [np.ascontiguousarray(x.T)]
            shape: tuple[int, ...] = (len(x), -1)
        else:
            channels = np.split(x, len(weights), axis=1)
            seen = [self.window.columns(one, self.settled.input_zero) for one in channels]
            columns, shape = [one for one, _ in seen], (self.channels, len(x), *seen[0][1])

        def assembled(groups: Iterator[Integers]) -> Integers:
            found = np.concatenate(list(groups))
            return found.T if self.window is None else found.reshape(shape).swapaxes(0, 1)

        pairs = list(zip(weights, columns, self._zeros(len(weights)), strict=True))
        exact = assembled(self._exact(*each) for each in pairs)
        clips = clip and x.dtype == np.uint8
        if not clip:
            return exact, None
        return exact, assembled(w.clipped(one) for w, one, _ in pairs) if clips else np.zeros_like(exact)

    def _zeros(self, groups: int) -> list[Integers]:
        zero = self.settled.weight_zero
        return np.split(zero, groups) if self.window is not None else [zero]

    def _exact(self, weight: PairedWeight, columns: Bytes, zeros: Integers) -> Integers:
        input_zero = self.settled.input_zero
        of_channels = weight.values.sum(1, dtype=np.int32) - zeros * len(columns)
        exact = weight.products(columns) - input_zero * of_channels[:, None]
        if zeros.any():
            exact -= zeros[:, None] * columns.sum(0, dtype=np.int32)
        return np.asarray(exact)

    def finish(self, sums: Integers) -> Array:
        """Returns the output for the given sums."""
        axes = () if self.window is None else (1,) * len(self.window.kernel)
        scale, bias, output_zero = self.settled.scale, self.settled.bias, self.settled.output_zero
        if bias is not None and bias.dtype == np.int32:
            sums, bias = sums + (bias if bias.ndim > 1 else bias.reshape(-1, *axes)), None
        if scale is None:
            return sums
        scaled = sums.astype(np.float32) * scale.reshape(-1, *axes)
        if output_zero is None:
            return np.asarray(scaled if bias is None else scaled + bias)
        ends, zero = np.iinfo(output_zero.dtype), int(output_zero)
        return np.asarray(np.clip(np.rint(scaled), ends.min - zero, ends.max - zero) + zero, ends.dtype)


def dynamically_quantized(x: Array) -> tuple[Bytes, np.float32, int]:
    """Quantizes floats to bytes as DynamicQuantizeLinear does; also returns the scale and zero point."""
    low, high = (np.float32(end(x, initial=0)) for end in (np.min, np.max))
    scale = (high - low) / np.float32(255) if high > low else np.float32(1)
    zero = np.rint(np.clip(-low / scale, np.float32(0), np.float32(255)))
    return np.asarray(np.clip(np.rint(x / scale), -zero, 255 - zero) + zero, np.uint8), scale, int(zero)


def int8_kernel(node: ir.Node, name: str) -> Int8Kernel | None:
    """Returns the uint8 x int8 kernel of a node; None for other nodes.

    Depthwise convolutions, computed weights, and stacks of matrices with several zero points have none.
    """
    if node.op_type not in EMULATED or not of_bytes(node, PLACES[node.op_type].x_zero):
        return None
    (place,), (zero,) = PLACES[node.op_type].weights, PLACES[node.op_type].weight_zeros
    weight, w_zero = constant(operand(node, place)), constant(operand(node, zero))
    if weight is None or weight.dtype != np.int8:
        return None
    window, stack = None, weight.shape[:-2]
    if node.op_type == "QLinearConv":
        count = node.attributes.get_int("group", 1)
        if count > 1 and weight.shape[0] == count and weight.shape[1] == 1:
            return None
        window, stack = window_of(node, weight.shape[2:]), ()
        groups = np.split(convolution_rows(weight), count)
    else:
        if node.op_type == "QGemm" and node.attributes.get_int("transB", False):
            weight = weight.T
        rows = product_rows(weight)
        groups = list(rows.reshape(-1, *rows.shape[-2:]))
    weights = tuple(PairedWeight(np.ascontiguousarray(one)) for one in groups)
    found = [one.overflowing.any(1) for one in weights]
    each = np.concatenate(found) if window is not None else np.any(found, axis=0)
    if w_zero is not None and w_zero.size not in (1, len(each)):
        return None  # one zero point per matrix of a stack is not supported
    numbers = Numbers.of(node, len(each), constant)
    return Int8Kernel(name, len(each), int(each.sum()), node, weights, numbers, window, stack)


def of_bytes(node: ir.Node, x_zero: int | None) -> bool:
    """Returns whether the activations may be uint8, which a constant zero point of another type rules out."""
    zero = None if x_zero is None else constant(operand(node, x_zero))
    return zero is None or zero.dtype == np.uint8


def _channels_last(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("channels_last", False))
