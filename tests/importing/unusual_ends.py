"""Files with unusual inputs, outputs, types, ranks, batch axes, names, opsets and orders of nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx_models import BOOL, FLOAT, FLOAT16, INT32, INT64
from small_nets import Net, floats
from unusual import FILES, Build, Unusual, file, ints, linear

_RANDOM = np.random.default_rng(11)
_IMAGE = (FLOAT, ["n", 3, 8, 8])


@file("three inputs, one unused")
def _unused(net: Net) -> Unusual:
    y = net.add("Sub", net.conv("a", 8, 3), net.conv("b", 8, 3))
    shapes = {"a": (2, 3, 8, 8), "unused": (2, 5), "b": (2, 3, 8, 8)}
    return Unusual([y], {name: floats(*shape) for name, shape in shapes.items()})


@file("an input of rank 0")
def _rank_0(net: Net) -> Unusual:
    y = net.add("Mul", net.conv("x", 8, 3), "gain")
    feeds = {"x": floats(2, 3, 8, 8), "gain": np.array(1.5, np.float32)}
    return Unusual([net.conv(y, 4, 8)], feeds)


@file("an input of rank 1 without a batch")
def _rank_1(net: Net) -> Unusual:
    y = linear(net, net.add("Relu", linear(net, "x", 12, 16)), 16, 4)
    return Unusual([y], {"x": floats(12)}, {"x": (FLOAT, [12])})


@file("inputs of rank 5 and 6")
def _ranks_5_and_6(net: Net) -> Unusual:
    a = net.add("Conv", "x", net.constant(floats(8, 3, 2, 2, 2)), strides=[2, 2, 2])
    blocks = net.add("Transpose", "blocks", perm=[0, 1, 4, 2, 5, 3])
    b = net.add("Reshape", blocks, net.constant(ints(0, 8, 2, 2, 2)))
    y = net.add("Conv", net.add("Add", a, b), net.constant(floats(4, 8, 1, 1, 1)))
    return Unusual([y], {"x": floats(2, 3, 4, 4, 4), "blocks": floats(2, 4, 2, 1, 2, 4)})


@file("the batch in the last axis")
def _batch_last(net: Net) -> Unusual:
    y = net.add("Relu", net.add("MatMul", net.constant(floats(16, 12)), "x"))
    y = net.add("MatMul", net.constant(floats(5, 16)), y)
    z = linear(net, net.add("Transpose", y), 5, 4)
    return Unusual([y, z], {"x": floats(12, 3)}, {"x": (FLOAT, [12, "n"])})


@file("the batch in the middle")
def _batch_in_the_middle(net: Net) -> Unusual:
    y = linear(net, net.add("Tanh", linear(net, "x", 12, 16)), 16, 4)
    return Unusual([y], {"x": floats(5, 3, 12)}, {"x": (FLOAT, [5, "n", 12])})


@file("no batch axis at all")
def _no_batch(net: Net) -> Unusual:
    y = linear(net, net.add("Relu", linear(net, "x", 12, 16)), 16, 4)
    return Unusual([y, net.add("ReduceMax", y, keepdims=0)], {"x": floats(7, 12)}, {"x": (FLOAT, [7, 12])})


@file("every axis of an image open")
def _open_axes(net: Net) -> Unusual:
    a = net.conv("x", 8, 3, strides=[2, 2])
    sizes = net.add("Shape", "x", start=2)
    zeros = net.constant(np.zeros(0, np.float32))
    scales = net.add("Cast", net.add("Div", sizes, net.add("Shape", a, start=2)), to=FLOAT)
    scales = net.add("Concat", net.constant(np.ones(2, np.float32)), scales, axis=0)
    up = net.add("Resize", a, zeros, scales, mode="nearest", nearest_mode="floor",
                 coordinate_transformation_mode="asymmetric")  # fmt: skip
    y = net.conv(up, 4, 8)
    return Unusual([y], {"x": floats(2, 3, 8, 12)}, {"x": (FLOAT, ["n", 3, "h", "w"])})


@file("bytes as an image")
def _bytes(net: Net) -> Unusual:
    x = net.add("Cast", net.add("Transpose", "pixels", perm=[0, 3, 1, 2]), to=FLOAT)
    x = net.add("Div", net.add("Sub", x, net.constant(np.float32(127))), net.constant(np.float32(128)))
    pixels = _RANDOM.integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    return Unusual([net.conv(net.add("Relu", net.conv(x, 8, 3)), 4, 8)], {"pixels": pixels})


@file("integers and a mask that choose values")
def _mask(net: Net) -> Unusual:
    rows = net.add("Gather", net.constant(floats(9, 16)), "ids")
    mask = net.add("Unsqueeze", "mask", net.constant(ints(-1)))
    y = net.add("Where", mask, linear(net, rows, 16, 8), net.constant(np.float32(-1)))
    ids = _RANDOM.integers(0, 9, (3, 5)).astype(np.int32)
    return Unusual([linear(net, y, 8, 4), "mask"], {"ids": ids, "mask": ids > 3})


@file("float16 at both ends")
def _half_ends(net: Net) -> Unusual:
    y = net.conv(net.add("Cast", "x", to=FLOAT), 8, 3)
    return Unusual([net.add("Cast", y, to=FLOAT16)], {"x": floats(2, 3, 8, 8).astype(np.float16)})


@file("float64 at both ends")
def _double_ends(net: Net) -> Unusual:
    y = net.conv(net.add("Cast", "x", to=FLOAT), 8, 3)
    return Unusual([net.add("Cast", y, to=TensorProto.DOUBLE)], {"x": floats(2, 3, 8, 8).astype(np.float64)})


@file("an output that is an input, and one used inside")
def _ends_that_meet(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    y = net.conv(net.add("Relu", a), 4, 8)
    return Unusual([y, "x", a])


@file("one tensor under two names, behind constants")
def _twice(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    first, second = net.add("Identity", a), net.add("Identity", a)
    number = net.add("Identity", net.constant(ints(4, 2)))
    return Unusual([second, number, net.conv(a, 4, 8), first])


@file("an initializer as an output")
def _constant_output(net: Net) -> Unusual:
    anchors, weight = net.constant(floats(6, 4)), net.constant(floats(8, 3, 3, 3))
    return Unusual([anchors, net.conv(net.add("Conv", "x", weight, pads=[1] * 4), 4, 8), weight])


@file("integers as outputs")
def _integer_outputs(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    top = net.add("ReduceMax", a, axes=[2, 3], keepdims=0)
    high = net.add("Greater", top, net.constant(np.float32(-100)))
    return Unusual([net.add("Shape", a), net.add("ReduceSum", net.add("Cast", high, to=INT32), net.constant(ints(1))),
                    high, top])  # fmt: skip


_NAMES = {
    "numbers": ["1", "2", "3", "4"],
    "colons and slashes": ["a/b:0", "a/b:1", "/a/b", "a//b/"],
    "dots": ["a.b", "a.b.c", "a", ".a..b."],
    "spaces": [" ", "a b", "a\tb", "a\nb"],
    "JSON": ['{"a": [1]}', "{'a': [1]}", "{'a': \"b\\\"}", "[]"],
    "other scripts": ["층", "ﬁlter", "µ", "x²"],
    "words of Python": ["lambda", "None", "class", "not"],
    "methods of modules": ["forward", "block.forward", "block.half", "training"],
    "words of the graph": ["inputs", "self", "a.self", "output"],
    "empty": ["", "", "", ""],
    "a quantizer's": ["x_QuantizeLinear", "x_DequantizeLinear", "x_quant", "/Conv_0_quant"],
}


def _named(names: list[str]) -> Build:
    def build(net: Net) -> Unusual:
        y = net.conv("x", 8, 3)
        for _ in names[1:]:
            y = net.add("Relu", net.conv(y, 8, 8))
        convolutions = [node for node in net.nodes if node.op_type == "Conv"]
        for node, name in zip(convolutions, names, strict=True):
            node.name = name
        return Unusual([y], pairs=len(names))

    return build


for _title, _names in _NAMES.items():
    FILES[f"nodes named with {_title}"] = _named(_names)


@file("values with the names that a quantizer makes")
def _quantizer_names(net: Net) -> Unusual:
    net.constants |= {
        "x_scale": floats(8, 3, 1, 1),
        "x_zero_point": floats(8),
        "w_quantized": floats(8, 8, 1, 1),
    }
    net.nodes += [
        helper.make_node("Conv", ["x", "x_scale", "x_zero_point"], ["x_QuantizeLinear_Output"], "a"),
        helper.make_node("Conv", ["x_QuantizeLinear_Output", "w_quantized"], ["x_DequantizeLinear_Output"], "b"),
        helper.make_node("Relu", ["x_DequantizeLinear_Output"], ["x_QuantizeLinear_Output_scale"], "c"),
    ]  # fmt: skip
    return Unusual(["x_QuantizeLinear_Output_scale", "x_QuantizeLinear_Output"], pairs=2)


@file("values with other names at both ends")
def _value_names(net: Net) -> Unusual:
    a = net.conv("image:0", 8, 3)
    net.nodes.append(helper.make_node("Sum", [a, "1", "{'a b': 층}"], ["out put/0"], "sum"))
    net.nodes.append(
        helper.make_node("Conv", ["out put/0", net.constant(floats(8, 8, 1, 1))], ["lambda"], "last")
    )
    feeds = {name: floats(2, 8, 8, 8) for name in ("1", "{'a b': 층}")}
    return Unusual(["out put/0", "lambda"], {"image:0": floats(2, 3, 8, 8), **feeds}, pairs=2)


def _of_version(opset: int, ir_version: int) -> Build:
    def build(net: Net) -> Unusual:
        a = net.add("Relu", net.norm(net.conv("x", 8, 3, bias=False), 8))
        flat = net.add("Flatten", net.add("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]))
        y = net.add("Softmax", net.add("Gemm", flat, net.constant(floats(128, 4)), net.constant(floats(4))))
        return Unusual(
            [y],
            opset=opset,
            more={"ir_version": ir_version},
            pairs=3,
            edit=_as_inputs if ir_version == 3 else None,
        )

    return build


def _as_inputs(model: onnx.ModelProto) -> None:
    """Lists the initializers as inputs, as IR 3 requires."""
    for one in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(one.name, one.data_type, one.dims))


for _pair in (
    (7, 3),
    (8, 3),
    (9, 4),
    (10, 5),
    (11, 6),
    (12, 7),
    (13, 7),
    (18, 8),
    (21, 9),
    (22, 10),
    (23, 11),
):
    FILES["opset {} of IR {}".format(*_pair)] = _of_version(*_pair)


@file("nodes in reverse order, without names")
def _reversed(net: Net) -> Unusual:
    a = net.add("Relu", net.conv("x", 8, 3))
    y = net.conv(net.add("Add", net.conv(a, 8, 8), a), 4, 8)

    def edit(model: onnx.ModelProto) -> None:
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(model.graph.node)]
        del model.graph.node[:]
        for node in nodes:
            node.name = ""
        model.graph.node.extend(nodes)

    return Unusual([y], edit=edit, inlined=True, pairs=3)


@file("empty tensors on the way")
def _empty(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    nothing = net.add("Slice", a, *(net.constant(ints(v)) for v in (0, 0, 1)))
    both = net.add("Concat", a, nothing, axis=1)
    target = net.add("Concat", net.constant(ints()), net.constant(ints(0, 8, 8, 8)), axis=0)
    return Unusual([net.conv(net.add("Reshape", both, target), 4, 8), nothing])


@file("a state between dynamic axes")
def _state(net: Net) -> Unusual:
    joined = net.add("Concat", "x", "state", axis=2)
    y = net.add("Conv", joined, net.constant(floats(8, 4, 3)))
    new = net.add("Slice", joined, *(net.constant(ints(v)) for v in (-2, 2**31, 2)))
    inputs: dict[str, Any] = {"x": (FLOAT, ["n", 4, "t"]), "state": (FLOAT, ["n", 4, 2])}
    return Unusual([y, new], {"x": floats(2, 4, 9), "state": floats(2, 4, 2)}, inputs)


@file("constants in the attributes of nodes")
def _constants(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    factor, shape = net.add("Constant", value_float=0.5), net.add("Constant", value_ints=[0, -1])
    flat = net.add("Reshape", net.add("Mul", a, factor), shape)
    row = net.add("Constant", value_floats=[float(i % 7) for i in range(512)])
    count = net.add("Unsqueeze", net.add("Constant", value_int=256), net.constant(ints(0)))
    parts = net.add(
        "Split", net.add("Add", flat, row), net.add("Concat", count, count, axis=0), axis=1, outputs=2
    )
    return Unusual([linear(net, parts, 256, 4), f"{parts}1"])


@file("a value of each type between two nodes")
def _types(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    whole = a
    for kind in (INT64, INT32, TensorProto.INT16, TensorProto.INT8, TensorProto.DOUBLE, FLOAT16, FLOAT):
        whole = net.add("Cast", whole, to=kind)
    return Unusual([net.conv(net.add("Add", a, whole), 4, 8), net.add("Cast", a, to=BOOL)], least=5)


def tensor(name: str, value: Any) -> onnx.TensorProto:
    """Returns a constant for a branch or body."""
    return numpy_helper.from_array(np.asarray(value), name)
