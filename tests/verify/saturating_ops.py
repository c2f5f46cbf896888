"""Models of one operator whose sums of two products overflow 16 bits, each with a scalar reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
Terms = tuple[tuple[int, ...], int, list[int], list[int]]  # output index, channel, activations, weights
LOW, HIGH = -32768, 32767


@dataclass(frozen=True)
class Op:
    """An operator with its constants and attributes.

    Attributes:
        kind: the operator's type.
        x: uint8 input, [N, C, H, W] or [..., K].
        weight: int8 weight in the operator's layout.
        zeros: zero points of input and weight.
        floats: whether the output is float, as with any MatMulIntegerToFloat and some QGemms.
    """

    kind: str
    x: Array
    weight: Array
    zeros: tuple[int, int] = (0, 0)
    floats: bool = False
    group: int = 1
    pad: int = 0
    stride: int = 1
    dilation: int = 1

    @property
    def channels(self) -> int:
        return int(self.weight.shape[0 if self.kind == "QLinearConv" else 1])

    @property
    def scales(self) -> tuple[np.float32, Array, np.float32]:
        """Scales of input, weight (per channel) and output, with which the outputs fill the uint8 range."""
        draw = np.random.default_rng(1)
        return (
            np.float32(0.02),
            draw.uniform(0.001, 0.003, self.channels).astype(np.float32),
            np.float32(0.01 * np.sqrt(self.weight.size / self.channels)),
        )

    @property
    def bias(self) -> Array:
        if self.kind == "MatMulIntegerToFloat":
            return np.random.default_rng(2).standard_normal(self.channels, dtype=np.float32)
        return np.random.default_rng(2).integers(-5000, 5000, self.channels, dtype=np.int32)

    def model(self) -> onnx.ModelProto:
        """Returns a model with only this node."""
        x_scale, w_scale, y_scale = self.scales
        constants = {
            "xs": x_scale, "xz": np.uint8(self.zeros[0]), "w": self.weight, "ws": w_scale,
            "wz": np.full(self.channels, self.zeros[1], np.int8), "ys": y_scale, "yz": np.uint8(100), "b": self.bias,
        }  # fmt: skip
        named = {
            "QLinearConv": "x xs xz w ws wz ys yz b",
            "QLinearMatMul": "x xs xz w ws wz ys yz",
            "QGemm": "x xs xz w ws wz b" + ("" if self.floats else " ys yz"),
            "MatMulIntegerToFloat": "x w xs ws xz wz b",
        }[self.kind].split()
        settings: dict[str, Any] = {}
        if self.kind == "QLinearConv":
            rank = self.x.ndim - 2
            settings = {"group": self.group, "pads": [self.pad] * 2 * rank, "strides": [self.stride] * rank}
            settings |= {"dilations": [self.dilation] * rank, "kernel_shape": self.weight.shape[2:]}
        domain = "com.microsoft" if self.kind in ("QGemm", "MatMulIntegerToFloat") else ""
        node = helper.make_node(self.kind, named, ["y"], name="op/node", domain=domain, **settings)
        graph = helper.make_graph(
            [node],
            "one",
            [helper.make_tensor_value_info("x", TensorProto.UINT8, [None] * self.x.ndim)],
            [
                helper.make_tensor_value_info(
                    "y", TensorProto.FLOAT if self.floats else TensorProto.UINT8, [None] * self.x.ndim
                )
            ],
            [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items() if k in named],
        )
        opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)

    def scalar(self, *, saturate: bool) -> Array:
        """Returns the output, computed product by product; `saturate` clips each sum of two to int16."""
        found: dict[tuple[int, ...], float] = {}
        x_scale, w_scale, y_scale = self.scales
        for place, m, a, w in self._convolved() if self.kind == "QLinearConv" else self._multiplied():
            total = _sum(a, w, clip=saturate) - self.zeros[0] * sum(w) - self.zeros[1] * sum(a)
            total += len(a) * self.zeros[0] * self.zeros[1]
            if self.kind in ("QLinearConv", "QGemm"):
                total += int(self.bias[m])
            value = np.float32(total) * (
                x_scale * w_scale[m] if self.floats else x_scale * w_scale[m] / y_scale
            )
            if self.kind == "MatMulIntegerToFloat":
                value = value + self.bias[m]
            found[place] = value if self.floats else min(max(round(float(value)) + 100, 0), 255)
        shape = [1 + max(axis) for axis in zip(*found, strict=True)]
        return np.reshape([found[place] for place in np.ndindex(*shape)], shape).astype(
            np.float32 if self.floats else np.uint8
        )

    def _multiplied(self) -> Iterator[Terms]:
        for row in np.ndindex(self.x.shape[:-1]):
            for m in range(self.channels):
                yield (*row, m), m, self.x[row].tolist(), self.weight[:, m].tolist()

    def _convolved(self) -> Iterator[Terms]:
        """Yields each output's terms by kernel position, then by channel of the group.

        The input is padded with its zero point.
        """
        ends, kernel = self.x.shape[2:], self.weight.shape[2:]
        size = [
            (n + 2 * self.pad - (k - 1) * self.dilation - 1) // self.stride + 1
            for n, k in zip(ends, kernel, strict=True)
        ]
        per_group, outputs = self.weight.shape[1], self.channels // self.group
        for n, m, *place in np.ndindex(len(self.x), self.channels, *size):
            a: list[int] = []
            w: list[int] = []
            for tap in np.ndindex(*kernel):
                at = [p * self.stride + k * self.dilation - self.pad for p, k in zip(place, tap, strict=True)]
                inside = all(0 <= i < end for i, end in zip(at, ends, strict=True))
                for c in range(per_group):
                    channel = m // outputs * per_group + c
                    a.append(int(self.x[(n, channel, *at)]) if inside else self.zeros[0])
                    w.append(int(self.weight[(m, c, *tap)]))
            yield (n, m, *place), m, a, w


def _sum(a: list[int], w: list[int], *, clip: bool) -> int:
    products = [x * y for x, y in zip(a, w, strict=True)]
    pairs = [sum(products[i : i + 2]) for i in range(0, len(products), 2)]
    return sum(min(max(pair, LOW), HIGH) if clip else pair for pair in pairs)


def _conv(
    inputs: int, outputs: int, kernel: int, group: int = 1, rank: int = 2, size: int = 5, **how: Any
) -> Op:
    weight = _weight(outputs, inputs // group, *[kernel] * rank)
    return Op("QLinearConv", _bytes(2, inputs, *[size] * rank), weight, group=group, **how)


def _weight(*shape: int) -> Array:
    values = np.array([127, 120, 100, -127, -128, -90, 3, -3], np.int8)
    return np.random.default_rng(3).choice(values, shape, p=[0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])


def _bytes(*shape: int) -> Array:
    return np.random.default_rng(4).choice(np.array([255, 254, 250, 128, 130, 0, 7], np.uint8), shape)


# Cases for the paths in MLAS: ConvSym (channels in fours), im2col and GEMM, groups, rank 1 and 3, vectors,
# odd depths, strides of 128 and 384 along K, and zero points of both operands.
CONVOLUTIONS = {
    "1x1, symmetric kernel": _conv(16, 32, 1),
    "1x1, odd depth": _conv(5, 7, 1),
    "1x1, one pixel": _conv(24, 16, 1, size=1),
    "3x3, symmetric kernel": _conv(8, 16, 3, pad=1, zeros=(255, 0)),
    "first, stride": _conv(3, 16, 3, pad=1, stride=2, zeros=(114, 0)),
    "3x3, odd channels": _conv(5, 9, 3, pad=1, zeros=(200, 0)),
    "3x3, dilated": _conv(6, 8, 3, pad=2, dilation=2, zeros=(9, 0)),
    "groups": _conv(16, 32, 3, group=4, pad=1, zeros=(3, 0)),
    "a channel a group, two outputs": _conv(8, 16, 3, group=8, pad=1, zeros=(220, 0)),
    "weights with a zero point": _conv(8, 16, 3, pad=1, zeros=(128, -1)),
    "1-D": _conv(6, 8, 3, rank=1, pad=1, zeros=(9, 0)),
    "3-D": _conv(4, 8, 3, rank=3, size=3, pad=1, zeros=(9, 0)),
}
PRODUCTS = {
    f"{kind}{' float' if floats else ''} {rows}x{depth}x{columns}": Op(
        kind, _bytes(*rows, depth), _weight(depth, columns), zeros, floats
    )
    for kind, floats in (("QLinearMatMul", False), ("QGemm", False), ("QGemm", True), ("MatMulIntegerToFloat", True))
    for rows, depth, columns, zeros in (
        ((1,), 15, 12, (0, 0)), ((3,), 16, 9, (77, 0)), ((1,), 130, 33, (5, 0)), ((6,), 517, 5, (128, -1)),
        *([((2, 3), 18, 6, (77, 0))] if kind != "QGemm" else []),
    )
}  # fmt: skip
OPS = CONVOLUTIONS | PRODUCTS
# Depthwise convolutions multiply in 32 bits on every CPU.
DEPTHWISE = {
    "16 channels": _conv(16, 16, 3, group=16, pad=1, zeros=(130, 0)),
    "12 channels": _conv(12, 12, 5, group=12, pad=2, zeros=(255, 0)),
    "1x1": _conv(3, 3, 1, group=3),
    "1-D": _conv(8, 8, 3, group=8, rank=1, pad=1, zeros=(9, 0)),
    "3-D": _conv(4, 4, 3, group=4, rank=3, size=3, pad=1, zeros=(9, 0)),
}
