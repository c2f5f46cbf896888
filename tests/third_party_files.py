"""Small files as other tools could write them: variants of uint8 x int8 operators and their graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
MS = "com.microsoft"
_LARGE = np.array([127, 120, 100, -127, -128, -90, 3, -3], np.int8)
_BYTES = np.array([255, 254, 250, 128, 130, 0, 7], np.uint8)


class File(NamedTuple):
    """A model, several batches of its inputs, and the operators whose saturation is not emulated: "name (reason)"."""

    model: onnx.ModelProto
    batches: list[dict[str, Array]]
    others: tuple[str, ...] = ()


def large(*shape: int, seed: int = 3) -> Array:
    """Returns int8 weights, most of them so large that two products with `bytes_of` overflow 16 bits."""
    return np.random.default_rng(seed).choice(_LARGE, shape)


def bytes_of(*shape: int, seed: int = 4) -> Array:
    """Returns uint8 activations, most of them large."""
    return np.random.default_rng(seed).choice(_BYTES, shape)


def floats(*shape: int, seed: int = 5) -> Array:
    """Returns values mostly near their maximum, so that most are quantized to large bytes."""
    draw = np.random.default_rng(seed)
    return np.asarray(draw.choice([4.0, 3.9, 3.7, 0.1, -0.5], shape), np.float32)


def file_of(
    nodes: list[onnx.NodeProto],
    stored: dict[str, Any],
    batches: list[dict[str, Array]],
    outputs: tuple[str, ...] = ("y",),
    functions: tuple[onnx.FunctionProto, ...] = (),
    others: tuple[str, ...] = (),
    opset: int = 17,
) -> File:
    """Returns a file whose inputs have the names and types of the batches; all their sizes are dynamic."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(one.dtype), [None] * one.ndim)
        for name, one in batches[0].items()
    ]
    ends = [onnx.ValueInfoProto(name=name) for name in outputs]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "g", inputs, ends, tensors)
    opsets = [
        helper.make_opsetid(*pair) for pair in (("", opset), (MS, 1), *([("own", 1)] if functions else []))
    ]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)
    return File(model, batches, others)


def numbers(zero: int = 3, weight_zero: Array | int = 0) -> dict[str, Any]:
    """Returns scales and zero_points that map outputs of a few hundred thousand to a byte's range."""
    return {
        "xs": np.float32(0.02), "xz": np.uint8(zero), "ws": np.float32(0.002),
        "wz": np.asarray(weight_zero, np.int8), "ys": np.float32(0.07), "yz": np.uint8(100),
    }  # fmt: skip


def conv(x: Array, weight: Array, *more: Array, bias: bool = False, zero: int = 114, **how: Any) -> File:
    stored = numbers(zero) | {"w": weight}
    if bias:
        stored["b"] = np.arange(len(weight), dtype=np.int32) * 500
    names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", *(["b"] if bias else [])]
    node = helper.make_node("QLinearConv", names, ["y"], "conv", **how)
    return file_of([node], stored, [{"x": one} for one in (x, *more)])


def product(x: Array, weight: Array, **how: Any) -> File:
    node = helper.make_node(
        "QLinearMatMul", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"], "product", **how
    )
    return file_of([node], numbers() | {"w": weight}, [{"x": x}])


def gemm(x: Array, weight: Array, bias: Array | None = None, *, out: bool = True, **how: Any) -> File:
    names = ["x", "xs", "xz", "w", "ws", "wz", "" if bias is None else "b", *(["ys", "yz"] if out else [])]
    stored = numbers() | {"w": weight} | ({} if bias is None else {"b": bias})
    return file_of([helper.make_node("QGemm", names, ["y"], "gemm", domain=MS, **how)], stored, [{"x": x}])


def integers(x: Array, weight: Array, **zeros: Any) -> File:
    names = ["x", "w", "xz" if "xz" in zeros else "", "wz" if "wz" in zeros else ""]
    node = helper.make_node("MatMulInteger", names, ["y"], "product")
    return file_of([node], {"w": weight, **zeros}, [{"x": x}])


def dynamic(
    x: Array, *weights: Array, per_column: bool = False, bias: bool = False, zero: int | None = 0
) -> File:
    """Returns a file of float products that share a dynamically quantized input."""
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"], "quantize")]
    stored: dict[str, Any] = {}
    for i, weight in enumerate(weights):
        count = weight.shape[-1]
        scale = np.linspace(0.001, 0.003, count if per_column else 1, dtype=np.float32)
        stored |= {f"w{i}": weight, f"ws{i}": scale if per_column else np.float32(scale[0])}
        if zero is not None:
            stored[f"wz{i}"] = np.full(count if per_column else (), zero, np.int8)
        nodes += [
            helper.make_node(
                "MatMulInteger", ["xq", f"w{i}", "xz", *([f"wz{i}"] if zero is not None else [])], [f"p{i}"],
                f"product{i}",
            ),
            helper.make_node("Cast", [f"p{i}"], [f"c{i}"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["xs", f"ws{i}"], [f"s{i}"]),
            helper.make_node("Mul", [f"c{i}", f"s{i}"], [f"m{i}" if bias else f"y{i}"]),
        ]  # fmt: skip
        if bias:
            stored[f"b{i}"] = np.linspace(-1, 1, count, dtype=np.float32)
            nodes.append(helper.make_node("Add", [f"m{i}", f"b{i}"], [f"y{i}"]))
    return file_of(nodes, stored, [{"x": x}, {"x": x[:1] * 3}], tuple(f"y{i}" for i in range(len(weights))))


def to_float(x: Array, weight: Array, zero: int = 0) -> File:
    """Returns a file of a float product that reads the scale and zero_point of its quantized input."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
        helper.make_node(
            "MatMulIntegerToFloat", ["xq", "w", "xs", "ws", "xz", "wz"], ["y"], "product", domain=MS
        ),
        helper.make_node("Mul", ["y", "xs"], ["z"]),
    ]
    stored = {"w": weight, "ws": np.float32(0.002), "wz": np.int8(zero)}
    return file_of(nodes, stored, [{"x": x}, {"x": x[:1] * 3}], ("y", "z"))


def convolutions() -> Iterator[tuple[str, File]]:
    for mode in ("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"):
        for rank, size in ((1, (14,)), (2, (9, 12)), (3, (5, 6, 4))):
            for kernel, stride in ((3, 2), (4, 1), (2, 3)):
                x, weight = bytes_of(2, 6, *size), large(8, 6, *[kernel] * rank)
                yield (
                    f"{mode} {rank}-D kernel {kernel} stride {stride}",
                    conv(x, weight, auto_pad=mode, strides=[stride] * rank, bias=stride == 2),
                )
    yield "auto_pad, groups", conv(bytes_of(3, 8, 7, 9), large(8, 4, 3, 3), auto_pad="SAME_LOWER", group=2)
    yield (
        "auto_pad VALID and dilations",
        conv(bytes_of(1, 4, 9, 9), large(8, 4, 3, 3), auto_pad="VALID", dilations=[2, 3]),
    )
    yield (
        "uneven pads and strides",
        conv(bytes_of(2, 4, 9, 7), large(8, 4, 3, 2), pads=[0, 2, 1, 1], strides=[2, 1]),
    )
    yield (
        "sizes and batches that change",
        conv(
            *(bytes_of(1, 4, 9, 7), large(8, 4, 3, 3), bytes_of(3, 4, 12, 5), bytes_of(2, 4, 4, 30)),
            auto_pad="SAME_UPPER", strides=[2, 2],
        ),
    )  # fmt: skip
    yield "no images", conv(bytes_of(2, 4, 5, 5), large(8, 4, 3, 3), bytes_of(0, 4, 5, 5))


def products() -> Iterator[tuple[str, File]]:
    yield "stacked weight", product(bytes_of(3, 5, 18), large(3, 18, 7))
    yield "stacked weight, broadcast input", product(bytes_of(5, 18), large(3, 18, 7))
    yield "stacked weight, broadcast both", product(bytes_of(2, 1, 5, 18), large(3, 18, 7))
    yield "stack of one", product(bytes_of(2, 4, 5, 18), large(1, 18, 7))
    yield "vector in", product(bytes_of(18), large(18, 7))
    yield "vector in, stacked weight", product(bytes_of(18), large(3, 18, 7))
    yield "vector as weight", product(bytes_of(4, 18), large(18))
    yield "alpha", gemm(bytes_of(6, 18), large(18, 7), alpha=0.37)
    yield "alpha, floats", gemm(bytes_of(6, 18), large(18, 7), alpha=0.37, out=False)
    yield "transA", gemm(bytes_of(18, 6), large(18, 7), transA=1)
    yield "transB", gemm(bytes_of(6, 18), large(7, 18), transB=1)
    yield "transA, transB, floats", gemm(bytes_of(18, 6), large(7, 18), transA=1, transB=1, out=False)
    for name, shape in (
        ("a row", (1, 7)),
        ("a column", (6, 1)),
        ("a matrix", (6, 7)),
        ("a number", (1,)),
        ("N", (7,)),
    ):
        bias = np.random.default_rng(6).integers(-9000, 9000, shape).astype(np.int32)
        yield f"bias is {name}", gemm(bytes_of(6, 18), large(18, 7), bias)
    yield "integers", integers(bytes_of(6, 19), large(19, 7))
    yield "integers, zero points", integers(bytes_of(6, 19), large(19, 7), xz=np.uint8(9), wz=np.int8(-3))
    zeros = np.arange(-3, 4).astype(np.int8)
    yield "integers, zero points a column", integers(bytes_of(6, 19), large(19, 7), xz=np.uint8(9), wz=zeros)
    yield "integers, stacked", integers(bytes_of(3, 6, 19), large(3, 19, 7), xz=np.uint8(9))
    yield "integers, int8 x int8", integers(large(6, 19, seed=8), large(19, 7))
    yield "dynamic", dynamic(floats(5, 33), large(33, 9))
    yield "dynamic, no zero point", dynamic(floats(5, 33), large(33, 9), zero=None)
    yield "dynamic, bias, columns", dynamic(floats(2, 5, 33), large(33, 9), per_column=True, bias=True)
    yield "dynamic, zero point", dynamic(floats(5, 33), large(33, 9), bias=True, zero=-5)
    yield (
        "dynamic, three of one input",
        dynamic(floats(2, 5, 32), *(large(32, 9, seed=i) for i in range(3)), bias=True),
    )
    yield "dynamic, stacked", dynamic(floats(3, 5, 32), large(3, 32, 9))
    yield "dynamic, to float", to_float(floats(5, 33), large(33, 9))
    yield "dynamic, to float, zero point", to_float(floats(5, 33), large(33, 9), zero=4)
    yield "dynamic, to float, stacked", to_float(floats(3, 5, 32), large(3, 32, 9))
