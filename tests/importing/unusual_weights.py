"""Files with weights in unusual places, or with functions, branches, loops, sequences or optional values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx_models import BOOL, FLOAT, INT64, Array
from small_nets import Net, between, floats
from unusual import MICROSOFT, Unusual, file, ints, linear, of_microsoft


def _pad(net: Net, x: str, weight: str, *bias: str) -> str:
    return net.add("Conv", x, weight, *bias, pads=[1] * 4)


@file("weights behind Concat, Slice and Split")
def _parts(net: Net) -> Unusual:
    both = net.add("Concat", net.constant(floats(4, 3, 3, 3)), net.constant(floats(4, 3, 3, 3)), axis=0)
    a = _pad(
        net, "x", both, net.add("Slice", net.constant(floats(12)), *(net.constant(ints(v)) for v in (2, 10)))
    )
    halves = net.add("Split", net.constant(floats(8, 8, 3, 3)), axis=0, outputs=2)
    return Unusual([_pad(net, _pad(net, a, halves), f"{_pad_half(net)}")], pairs=3)


def _pad_half(net: Net) -> str:
    return net.add("Gather", net.constant(floats(8, 8, 4, 3, 3)), net.constant(np.array(3)))


@file("weights behind Squeeze, Unsqueeze and Expand")
def _axes(net: Net) -> Unusual:
    wide = net.add("Unsqueeze", net.constant(floats(8, 3)), net.constant(ints(2, 3)))
    a = net.add("Conv", "x", wide)
    thin = net.add("Squeeze", net.constant(floats(1, 8, 8, 3, 3)), net.constant(ints(0)))
    b = _pad(net, a, thin)
    mean = net.add(
        "Expand", net.constant(np.full((1, 1, 1, 1), 1 / 9, np.float32)), net.constant(ints(8, 1, 3, 3))
    )
    return Unusual([net.add("Conv", b, mean, group=8)], pairs=3)


@file("a weight behind Identity, Cast, Reshape and Transpose")
def _chain(net: Net) -> Unusual:
    half = net.add("Identity", net.constant(floats(3, 3, 24).astype(np.float16)))
    whole = net.add("Reshape", net.add("Cast", half, to=FLOAT), net.constant(ints(3, 3, 3, 8)))
    a = _pad(net, "x", net.add("Transpose", whole, perm=[3, 2, 0, 1]))
    double = net.add("Cast", net.constant(floats(4, 8, 3, 3).astype(np.float64)), to=FLOAT)
    return Unusual([_pad(net, a, double)], pairs=2)


@file("a weight of bytes, and one of blocks of bytes")
def _bytes(net: Net) -> Unusual:
    integers = np.random.default_rng(3).integers(-128, 128, (8, 3, 3, 3)).astype(np.int8)
    scales = net.constant(between(0.001, 0.01, 8)), net.constant(np.zeros(8, np.int8))
    a = _pad(net, "x", net.add("DequantizeLinear", net.constant(integers), *scales, axis=0))
    flat = net.add("Reshape", a, net.constant(ints(0, -1)))
    table = np.random.default_rng(4).integers(-128, 128, (512, 8)).astype(np.int8)
    blocks = net.constant(between(0.001, 0.01, 16, 8))
    weight = net.add("DequantizeLinear", net.constant(table), blocks, axis=0, block_size=32)
    return Unusual([net.add("MatMul", flat, weight)], pairs=2, opset=21)


@file("a weight and a bias that Conv, Gemm and MatMul share")
def _shared(net: Net) -> Unusual:
    weight, bias = net.constant(floats(8, 8)), net.constant(floats(8))
    kernel = net.add("Reshape", weight, net.constant(ints(8, 8, 1, 1)))
    a = net.add("Relu", net.add("Conv", net.conv("x", 8, 3), kernel, bias))
    b = net.add("Flatten", net.add("GlobalMaxPool", a))
    c = net.add("Gemm", b, weight, bias, transB=1)
    d = net.add("MatMul", net.add("Tanh", c), net.add("Transpose", weight))
    return Unusual([net.add("Gemm", d, weight, bias)], pairs=5, least=8)


@file("a table that is looked up and multiplied with")
def _tied(net: Net) -> Unusual:
    table = net.constant(floats(20, 16))
    y = net.add("Tanh", linear(net, net.add("Gather", table, "ids"), 16, 16))
    return Unusual(
        [net.add("MatMul", y, net.add("Transpose", table))],
        {"ids": np.array([[1, 5, 0], [19, 7, 7]])},
        pairs=2,
    )


@file("a weight that is an operand too")
def _operand(net: Net) -> Unusual:
    weight, bias = net.constant(floats(8, 8, 1, 1)), net.constant(floats(8))
    a = net.add("Conv", net.conv("x", 8, 3), weight, bias)
    moved = net.add("Add", net.add("Transpose", a, perm=[0, 2, 3, 1]), bias)
    y = net.add("Mul", net.add("Transpose", moved, perm=[0, 3, 1, 2]), net.add("ReduceMax", weight))
    return Unusual([net.conv(y, 4, 8), weight], pairs=2)


@file("weights that a Conv and a ConvTranspose share")
def _both_ways(net: Net) -> Unusual:
    weight = net.constant(floats(8, 3, 2, 2))
    a = net.add("Relu", net.add("Conv", "x", weight, strides=[2, 2]))
    return Unusual([net.conv(net.add("ConvTranspose", a, weight, strides=[2, 2]), 4, 3)], pairs=2)


@file("a sparse initializer")
def _sparse(net: Net) -> Unusual:
    a = net.add("Gemm", "x", "sparse", net.constant(floats(16)))

    def edit(model: onnx.ModelProto) -> None:
        values = numpy_helper.from_array(floats(40), "sparse")
        places = numpy_helper.from_array(np.arange(0, 160, 4, dtype=np.int64))
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [10, 16]))

    return Unusual([linear(net, net.add("Relu", a), 16, 4)], {"x": floats(3, 10)}, edit=edit)


@file("a sparse constant")
def _sparse_constant(net: Net) -> Unusual:
    places = numpy_helper.from_array(np.array([[0, 3], [4, 1], [9, 15]]))
    sparse = helper.make_sparse_tensor(numpy_helper.from_array(floats(3), "v"), places, [10, 16])
    a = net.add("MatMul", "x", net.add("Constant", sparse_value=sparse))
    return Unusual([linear(net, net.add("Add", a, linear(net, "x", 10, 16)), 16, 4)], {"x": floats(3, 10)})


def _node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, outputs, **attributes)


def _reference(node: onnx.NodeProto, name: str, kind: int) -> onnx.NodeProto:
    made = onnx.AttributeProto(name=name, ref_attr_name=name)
    made.type = kind  # type: ignore[assignment]
    node.attribute.append(made)
    return node


@file("functions within functions, with attributes")
def _functions(net: Net) -> Unusual:
    kinds = onnx.AttributeProto
    standard = [helper.make_opsetid("", 17)]
    convolve = _reference(_node("Conv", ["x", "w"], ["y"], pads=[1] * 4), "group", kinds.INT)
    leak = _reference(_node("LeakyRelu", ["a"], ["b"]), "alpha", kinds.FLOAT)
    inner = helper.make_function("mine", "Grouped", ["x", "w"], ["y"], [convolve], standard, ["group"])
    call = _reference(_node("Grouped", ["x", "w"], ["a"], domain="mine"), "group", kinds.INT)
    outer = helper.make_function(
        "mine",
        "Layer",
        ["x", "w"],
        ["b"],
        [call, leak],
        [*standard, helper.make_opsetid("mine", 1)],
        ["group", "alpha"],
    )
    a = net.add(
        "Layer", net.conv("x", 8, 3), net.constant(floats(8, 8, 3, 3)), domain="mine", group=1, alpha=0.5
    )
    b = net.add("Layer", a, net.constant(floats(8, 2, 3, 3)), domain="mine", group=4, alpha=0.1)
    return Unusual(
        [b],
        pairs=3,
        inlined=True,
        imports=[helper.make_opsetid("mine", 1)],
        more={"functions": [inner, outer]},
    )


@file("a function that the file has instead of ONNX Runtime")
def _own_operator(net: Net) -> Unusual:
    body = [_node("Sigmoid", ["x"], ["s"]), _node("Mul", ["x", "s"], ["y"])]
    own = helper.make_function(
        MICROSOFT, "QuickGelu", ["x"], ["y"], body, [helper.make_opsetid("", 17)], ["alpha"]
    )
    y = net.conv(net.add("QuickGelu", net.conv("x", 8, 3), domain=MICROSOFT, alpha=1.0), 4, 8)
    return Unusual([y], pairs=2, inlined=True, imports=of_microsoft(), more={"functions": [own]})


def _graph(name: str, nodes: Sequence[onnx.NodeProto], output: str, **weights: Array) -> onnx.GraphProto:
    ends = [helper.make_empty_tensor_value_info(output)]
    return helper.make_graph(
        nodes, name, [], ends, [numpy_helper.from_array(v, k) for k, v in weights.items()]
    )


@file("branches in branches, one by an input and one by a size")
def _branches(net: Net) -> Unusual:
    inner = _node("If", ["small"], ["chosen"],
                  then_branch=_graph("small", [_node("Relu", ["a"], ["p"])], "p"),
                  else_branch=_graph("large", [_node("Neg", ["a"], ["q"])], "q"))  # fmt: skip
    taken = [_node("Conv", ["x", "w"], ["a"], name="inside", pads=[1] * 4), inner]
    net.nodes += [_node("Shape", ["x"], ["sizes"], start=3), _node("Squeeze", ["sizes"], ["width"])]
    net.nodes.append(_node("Less", ["width", net.constant(np.array(9))], ["small"]))
    y = net.add("If", "fast", then_branch=_graph("fast", taken, "chosen", w=floats(8, 3, 3, 3)),
                else_branch=_graph("slow", [_node("Abs", ["x"], ["r"])], "r"))  # fmt: skip
    inputs: dict[str, Any] = {"x": (FLOAT, ["n", 3, 8, 8]), "fast": (BOOL, [])}
    return Unusual([net.conv(y, 4, 8)], inputs=inputs, fixed={"fast": np.array(True)}, pairs=2, inlined=True)


@file("a Loop of a constant count that collects its steps")
def _loop(net: Net) -> Unusual:
    body = helper.make_graph(
        [_node("Mul", ["state", "decay"], ["next"]), _node("Identity", ["going"], ["on"]),
         _node("Identity", ["next"], ["kept"])], "body",
        [helper.make_tensor_value_info("i", INT64, []), helper.make_tensor_value_info("going", BOOL, []),
         helper.make_tensor_value_info("state", FLOAT, None)],
        [helper.make_empty_tensor_value_info(name) for name in ("on", "next", "kept")],
        [numpy_helper.from_array(np.array(0.5, np.float32), "decay")],
    )  # fmt: skip
    a = net.conv("x", 8, 3)
    last = net.add("Loop", net.constant(np.array(3)), net.constant(np.array(True)), a, body=body, outputs=2)
    steps = net.add("Transpose", f"{last}1", perm=[1, 0, 2, 3, 4])
    rows = net.add("Reshape", steps, net.constant(ints(0, 24, 8, 8)))
    return Unusual([net.conv(rows, 4, 24), last], pairs=2)


@file("optional values")
def _optional(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    maybe = net.add("Optional", a)
    there = net.add("OptionalHasElement", maybe)
    y = net.add("Where", there, net.add("OptionalGetElement", maybe), net.constant(np.float32(0)))
    return Unusual([net.conv(y, 4, 8)])


@file("sequences of unequal parts")
def _sequences(net: Net) -> Unusual:
    parts = net.add("SplitToSequence", net.conv("x", 8, 3), net.constant(ints(3, 5)), axis=1)
    parts = net.add("SequenceInsert", parts, net.conv("x", 2, 3), net.constant(np.array(0)))
    return Unusual([net.conv(net.add("ConcatFromSequence", parts, axis=1), 4, 10)])


@file("a body that reads a constant of the file")
def _scan(net: Net) -> Unusual:
    body = helper.make_graph(
        [_node("MatMul", ["row", "w"], ["h"]), _node("Add", ["h", "before"], ["next"]),
         _node("Tanh", ["next"], ["out"])],
        "body",
        [helper.make_tensor_value_info(name, FLOAT, ["n", 8]) for name in ("before", "row")],
        [helper.make_tensor_value_info(name, FLOAT, ["n", 8]) for name in ("next", "out")],
    )  # fmt: skip
    net.constants["w"] = floats(8, 8)
    rows = linear(net, "x", 12, 8)
    start = net.add("ReduceMin", rows, axes=[0], keepdims=0)
    last = net.add("Scan", start, rows, body=body, num_scan_inputs=1, scan_input_directions=[1], outputs=2)
    y = net.add("MatMul", f"{last}1", net.constant(floats(8, 4)))
    return Unusual([y, last], {"x": floats(5, 2, 12)}, {"x": (FLOAT, [5, "n", 12])}, pairs=2)
