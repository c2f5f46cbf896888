"""Small ONNX graphs with patterns of real files, and a class for what their quantized files must contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from onnx_models import FLOAT, Array, save

_RANDOM = np.random.default_rng(5)


def begin_again() -> None:
    """Resets the random generators, so that the same numbers are drawn whatever was drawn before."""
    torch.manual_seed(5)
    _RANDOM.bit_generator.state = np.random.default_rng(5).bit_generator.state


def floats(*shape: int) -> Array:
    """Returns normally distributed values, scaled like weights."""
    values: Array = _RANDOM.normal(0, 1, shape) / max(1.0, float(np.sqrt(np.prod(shape[1:]))))
    return values.astype(np.float32)


def between(low: float, high: float, *shape: int) -> Array:
    """Returns uniformly distributed values."""
    return _RANDOM.uniform(low, high, shape).astype(np.float32)


class Net:
    """A graph under construction: nodes in order and constants by name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}

    def add(self, operator: str, *inputs: str, name: str = "", outputs: int = 1, **attributes: Any) -> str:
        """Adds a node and returns its first output."""
        name = name or f"/{operator}_{len(self.nodes)}"
        made = [f"{name}_out{i or ''}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), made, name, **attributes))
        return made[0]

    def constant(self, value: Any) -> str:
        """Adds an initializer and returns its name."""
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name

    def conv(
        self, x: str, out: int, inputs: int, size: int = 3, *, bias: bool = True, **attributes: Any
    ) -> str:
        """Adds a convolution whose default padding keeps the image size."""
        given = [self.constant(floats(out, inputs, size, size))] + [self.constant(floats(out))] * bias
        attributes.setdefault("pads", [size // 2] * 4)
        return self.add("Conv", x, *given, **attributes)

    def norm(self, x: str, channels: int) -> str:
        """Adds a BatchNormalization."""
        values = (
            between(0.5, 1.5, channels),
            floats(channels),
            floats(channels),
            between(0.5, 1.5, channels),
        )
        return self.add("BatchNormalization", x, *map(self.constant, values))

    def head(self, x: str, channels: int) -> str:
        """Adds a global pool and a Gemm to 10 classes."""
        flat = self.add("Flatten", self.add("GlobalAveragePool", x))
        return self.add(
            "Gemm", flat, self.constant(floats(10, channels)), self.constant(floats(10)), transB=1
        )


@dataclass
class Case:
    """A graph and the expected properties of the written file.

    Attributes:
        build: builds the graph and returns the names of its outputs.
        inputs: shapes of the float inputs.
        kernels: exact count of each listed operator that ONNX Runtime runs; others may run too.
        gone, changed: number of removed and of changed nodes.
        new: number of added nodes by operator.
        opset: opset of the source.
        steps: tolerance as in `same`; 1 where another order of float sums may change a rounding.
    """

    build: Callable[[Net], tuple[str, ...]]
    kernels: Mapping[str, int]
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"x": (2, 3, 16, 16)})
    gone: int = 0
    changed: int = 0
    new: Mapping[str, int] = field(default_factory=dict)
    opset: int = 17
    steps: float = 0.05


def saved(case: Case, folder: Path, **more: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """Writes the file of a case and returns its path and inputs for it."""
    net = Net()
    ends = case.build(net)
    feeds = {name: torch.from_numpy(floats(*shape) * 3) for name, shape in case.inputs.items()}
    inputs: dict[str, Any] = {name: (FLOAT, ["n", *shape[1:]]) for name, shape in case.inputs.items()}
    path = folder / "float.onnx"
    return save(path, net.nodes, inputs, list(ends), net.constants, opset=case.opset, **more), feeds


def residual(net: Net) -> tuple[str, ...]:
    a = net.add("Relu", net.norm(net.conv("x", 16, 3, bias=False), 16))
    b = net.add("Relu", net.norm(net.conv(a, 16, 16), 16))
    c = net.norm(net.conv(b, 16, 16, bias=False), 16)
    return (net.head(net.add("Relu", net.add("Add", c, a)), 16),)


def depthwise(net: Net) -> tuple[str, ...]:
    six = net.constant(np.float32(6)), net.constant(np.float32(0))
    a = net.add("Clip", net.conv("x", 18, 3, strides=[2, 2]), six[1], six[0])
    b = net.add("Clip", net.conv(a, 18, 1, group=18), six[1], six[0])
    return (net.head(net.conv(b, 18, 18, 1), 18),)


def groups(net: Net) -> tuple[str, ...]:
    return (net.conv(net.conv("x", 16, 3), 24, 4, group=4),)


def gemms(net: Net) -> tuple[str, ...]:
    x = net.add("Relu", net.add("Gemm", "x", net.constant(floats(8, 12)), net.constant(floats(12))))
    x = net.add("Gemm", x, net.constant(floats(12, 12)), transB=1)
    x = net.add("Tanh", x)
    scaled = net.constant(floats(1, 6))
    return (net.add("Gemm", x, net.constant(floats(12, 6)), scaled, alpha=0.5, beta=2.0),)


def matmuls(net: Net) -> tuple[str, ...]:
    x = net.add("MatMul", "x", net.constant(floats(8, 12)))
    x = net.add("Tanh", net.add("Add", x, net.constant(floats(12))))
    return (net.add("MatMul", x, net.constant(floats(12, 6))),)


def concat(net: Net) -> tuple[str, ...]:
    parts = [net.add("Relu", net.conv("x", 8, 3, size)) for size in (1, 3, 5)]
    pool = net.add("MaxPool", parts[0], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    return (net.head(net.conv(net.add("Concat", *parts, pool, axis=1), 16, 32), 16),)


def pools(net: Net) -> tuple[str, ...]:
    a = net.add("MaxPool", net.conv("x", 16, 3), kernel_shape=[2, 2], strides=[2, 2])
    b = net.add("AveragePool", net.conv(a, 16, 16), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    mean = net.add("ReduceMean", net.conv(b, 16, 16), axes=[2, 3], keepdims=0)
    return (net.add("Gemm", mean, net.constant(floats(16, 4))),)


def shared(net: Net) -> tuple[str, ...]:
    weight, bias = net.constant(floats(16, 16, 3, 3)), net.constant(floats(16))
    a = net.add("Relu", net.conv("x", 16, 3))
    b = net.add("Relu", net.add("Conv", a, weight, bias, pads=[1] * 4))
    return (net.head(net.add("Conv", b, weight, bias, pads=[1] * 4), 16),)


def two_ends(net: Net) -> tuple[str, ...]:
    a, b = net.conv("x", 16, 3), net.conv("y", 16, 3)
    both = net.add("Add", a, b)
    return net.conv(both, 4, 16), both


def uneven(net: Net) -> tuple[str, ...]:
    a = net.add("Relu", net.conv("x", 16, 3, pads=[0, 0, 1, 1], strides=[2, 2]))
    return (net.conv(net.conv(a, 16, 16, pads=[2, 1, 0, 1]), 8, 16, pads=None, auto_pad="SAME_LOWER"),)


def silu(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    a = net.add("Mul", a, net.add("Sigmoid", a))
    b = net.conv(a, 16, 16)
    return (net.head(net.add("Add", a, net.add("Mul", b, net.add("Sigmoid", b))), 16),)


def hard_swish(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    ends = [net.constant(np.float32(one)) for one in (3, 0, 6, 6)]
    a = net.add("Div", net.add("Mul", a, net.add("Clip", net.add("Add", a, ends[0]), *ends[1:3])), ends[3])
    b = net.conv(a, 16, 16)
    gate = net.add("HardSigmoid", net.conv(net.add("GlobalAveragePool", b), 16, 16, 1), alpha=1 / 6)
    return (net.conv(net.add("HardSwish", net.add("Mul", b, gate)), 8, 16),)


def gelu(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    erf = net.add("Erf", net.add("Div", a, net.constant(np.float32(np.sqrt(2)))))
    product = net.add("Mul", a, net.add("Add", erf, net.constant(np.float32(1))))
    return (net.conv(net.add("Mul", product, net.constant(np.float32(0.5))), 16, 16),)


def dense_block(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    b = net.add("Concat", a, net.conv(a, 16, 16), axis=1)
    return (net.head(net.conv(net.add("Relu", net.norm(b, 32)), 16, 32), 16),)


def transposed(net: Net) -> tuple[str, ...]:
    a = net.add("Relu", net.conv("x", 16, 3))
    weights = [net.constant(floats(16, 8, 2, 2)), net.constant(floats(8))]
    b = net.add("Relu", net.add("ConvTranspose", a, *weights, strides=[2, 2]))
    other = net.constant(floats(8, 8, 3, 3))
    c = net.add("ConvTranspose", b, other, strides=[2, 2], pads=[1, 1, 0, 0])
    return (net.add("Sigmoid", net.conv(c, 4, 8)),)


def moved(net: Net) -> tuple[str, ...]:
    a = net.add("Relu", net.conv("x", 16, 3))
    flat = net.add("Reshape", a, net.constant(np.array([0, 16, 256])))
    rows = net.add("Transpose", flat, perm=[0, 2, 1])
    hidden = net.add("MatMul", rows, net.constant(floats(16, 24)))
    hidden = net.add("Add", hidden, net.constant(floats(24)))
    return (net.add("MatMul", net.add("Softmax", hidden, axis=-1), net.constant(floats(24, 5))),)


def several(net: Net) -> tuple[str, ...]:
    parts = [net.conv("x", 8, 3) for _ in range(3)]
    summed = net.conv(net.add("Sum", *parts), 8, 8)
    halves = net.add("Split", summed, axis=1, outputs=2)
    return (net.conv(net.add("Sub", halves, f"{halves}1"), 8, 4),)


def layer_scale(net: Net) -> tuple[str, ...]:
    x = net.add("MatMul", "x", net.constant(floats(8, 12)))
    x = net.add("Mul", x, net.constant(between(0.5, 2, 12)))
    x = net.add("Tanh", x)
    y = net.add("Transpose", net.add("MatMul", x, net.constant(floats(12, 6))), perm=[0, 2, 1])
    return (net.add("Mul", y, net.constant(between(0.5, 2, 6, 1))),)


def norm_behind_matmul(net: Net) -> tuple[str, ...]:
    x = net.norm(net.add("MatMul", "x", net.constant(floats(8, 12))), 12)
    return (net.add("MatMul", net.add("Relu", x), net.constant(floats(12, 6))),)


def fused_conv(net: Net) -> tuple[str, ...]:
    given = [net.constant(floats(16, 3, 3, 3)), net.constant(floats(16))]
    a = net.add("FusedConv", "x", *given, domain="com.microsoft", activation="Relu", pads=[1] * 4)
    return (net.conv(a, 8, 16),)


def layer_norm(net: Net) -> tuple[str, ...]:
    rows = net.conv("x", 16, 3)
    centered = net.add("Sub", rows, net.add("ReduceMean", rows, axes=[-1]))
    square = net.add("Pow", centered, net.constant(np.float32(2)))
    variance = net.add("Add", net.add("ReduceMean", square, axes=[-1]), net.constant(np.float32(1e-5)))
    normal = net.add("Div", centered, net.add("Sqrt", variance))
    y = net.add("Add", net.add("Mul", normal, net.constant(between(0.5, 1.5, 16))), net.constant(floats(16)))
    return (net.conv(y, 8, 16),)


def conditions(net: Net) -> tuple[str, ...]:
    a, b = net.conv("x", 8, 3), net.conv("x", 8, 3)
    mask = net.add("Greater", a, net.constant(np.float32(0)))
    c = net.add("Where", mask, a, b)
    d = net.add("Max", c, net.add("Neg", b))
    e = net.add("Pad", d, net.constant(np.array([0, 0, 1, 1, 0, 0, 1, 1])))
    return net.conv(net.add("Slice", e, *(net.constant(np.array([i])) for i in (1, 15, 2))), 8, 8), a


def signals(net: Net) -> tuple[str, ...]:
    a = net.add("Conv", "x", net.constant(floats(16, 3, 3)), net.constant(floats(16)), pads=[1, 1])
    b = net.add("MaxPool", net.add("Relu", a), kernel_shape=[2], strides=[2])
    up = net.constant(floats(16, 8, 4)), net.constant(floats(8))
    c = net.add("ConvTranspose", b, *up, strides=[2], pads=[1, 1])
    return (net.add("Conv", c, net.constant(floats(8, 8, 3))),)


def uneven_stride(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    b = net.add("ConvTranspose", a, net.constant(floats(16, 4, 4, 3)), strides=[2, 1], pads=[1] * 4, group=2)
    return (net.conv(b, 4, 8),)


def gate(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    mean = net.conv(net.add("ReduceMean", a, axes=[2, 3]), 16, 16, 1)
    return (net.conv(net.add("Mul", a, net.add("Sigmoid", mean)), 8, 16),)


def parts_with_other_readers(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    sigmoid = net.add("Sigmoid", a)
    b = net.conv(net.add("Mul", a, sigmoid), 16, 16)
    erf = net.add("Erf", net.add("Div", b, net.constant(np.float32(np.sqrt(2)))))
    product = net.add("Mul", b, net.add("Add", erf, net.constant(np.float32(1))))
    c = net.conv(net.add("Mul", product, net.constant(np.float32(0.5))), 8, 16)
    return c, net.conv(sigmoid, 8, 16), net.conv(erf, 8, 16)


def ends_in_the_middle(net: Net) -> tuple[str, ...]:
    a = net.conv("x", 16, 3)
    b = net.add("Relu", a)
    c = net.conv(b, 16, 16)
    d = net.conv(net.add("Add", c, net.norm(c, 16)), 8, 16)
    return a, b, d


def attention(net: Net) -> tuple[str, ...]:
    heads = net.constant(np.array([0, 0, 4, 4]))
    split = []
    for axes in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
        rows = net.add("Add", net.add("MatMul", "x", net.constant(floats(16, 16))), net.constant(floats(16)))
        split.append(net.add("Transpose", net.add("Reshape", rows, heads), perm=axes))
    scores = net.add("MatMul", net.add("Mul", split[0], net.constant(np.float32(0.5))), split[1])
    mixed = net.add("MatMul", net.add("Softmax", scores, axis=-1), split[2])
    rows = net.add(
        "Reshape", net.add("Transpose", mixed, perm=[0, 2, 1, 3]), net.constant(np.array([0, 0, 16]))
    )
    rows = net.add("Add", "x", net.add("MatMul", rows, net.constant(floats(16, 16))))
    scale = net.constant(between(0.5, 1.5, 16)), net.constant(floats(16))
    return (net.add("MatMul", net.add("LayerNormalization", rows, *scale), net.constant(floats(16, 3))),)


def constant_on_the_left(net: Net) -> tuple[str, ...]:
    rows = net.add("Reshape", net.conv("x", 16, 3), net.constant(np.array([0, 16, 256])))
    return (
        net.add("MatMul", net.add("MatMul", net.constant(floats(8, 16)), rows), net.constant(floats(256, 4))),
    )
