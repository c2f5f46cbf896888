"""Files with unusual forms of operators between convolutions and products."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto
from onnx_models import FLOAT, INT32, INT64
from small_nets import Net, between, floats
from unusual import FILES, Build, Unusual, file, ints, linear

from qatkit_verify.installed import version_numbers


@file("Dropout whose mask is read")
def _dropout(net: Net) -> Unusual:
    a = net.add(
        "Dropout",
        net.conv("x", 8, 3),
        net.constant(np.float32(0.5)),
        net.constant(np.array(False)),
        outputs=2,
    )
    scale = net.add("Cast", f"{a}1", to=FLOAT)
    return Unusual([net.conv(net.add("Mul", a, scale), 4, 8), f"{a}1"])


@file("Dropout in training mode that drops nothing")
def _idle_dropout(net: Net) -> Unusual:
    a = net.add("Dropout", net.conv("x", 8, 3), net.constant(np.float32(0)), net.constant(np.array(True)))
    return Unusual([net.conv(a, 4, 8)])


# Earlier versions of ONNX Runtime truncate interpolated bytes instead of rounding them.
_ROUNDS = version_numbers(onnxruntime.__version__) >= version_numbers("1.31")
_HOW, _NEAREST = "coordinate_transformation_mode", "nearest_mode"
_RESIZES: dict[str, tuple[int, dict[str, Any], list[float], list[int]]] = {
    "opset 10, linear by factors": (10, {"mode": "linear"}, [1, 1, 1.5, 2], []),
    "opset 11, tf_half_pixel_for_nn": (11, {_HOW: "tf_half_pixel_for_nn"}, [1, 1, 2, 2], []),
    "cubic beyond the borders": (
        13, {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}, [], [2, 8, 11, 5],
    ),
    "nearest, aligned corners": (13, {_HOW: "align_corners", _NEAREST: "ceil"}, [], [2, 8, 13, 13]),
    "factors near 1": (17, {"mode": "linear", _HOW: "asymmetric"}, [1, 1, 1.1, 1.05], []),
    "a part of the image": (17, {"mode": "linear", _HOW: "tf_crop_and_resize"}, [], [2, 8, 6, 6]),
    "antialias": (18, {"mode": "linear", "antialias": 1}, [], [2, 8, 4, 4]),
    "axes and an aspect ratio": (18, {"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}, [], [12, 20]),
    "half_pixel_symmetric": (19, {"mode": "linear", _HOW: "half_pixel_symmetric"}, [1, 1, 1.3, 1.7], []),
}  # fmt: skip


def _resize(opset: int, attributes: dict[str, Any], scales: list[float], sizes: list[int]) -> Build:
    def build(net: Net) -> Unusual:
        a = net.conv("x", 8, 3)
        factors = net.constant(np.array(scales, np.float32))
        roi = net.constant(np.array([0, 0, 0.2, 0.2, 1, 1, 0.8, 0.8], np.float32))
        given = (
            [factors] if opset == 10 else [roi, factors] if scales else [roi, "", net.constant(ints(*sizes))]
        )
        if opset == 11 and sizes:
            given[1] = net.constant(np.zeros(0, np.float32))
        b = net.add("Resize", a, *given, **attributes)
        inputs = {"x": (FLOAT, [2, 3, 8, 8])}
        return Unusual([net.conv(b, 4, 8)], inputs=inputs, opset=opset, pairs=2)

    return build


for _title, _given in _RESIZES.items():
    FILES[f"Resize: {_title}"] = _resize(*_given)


@file("Upsample of opset 9 and of opset 7")
def _upsample(net: Net) -> Unusual:
    a = net.add("Upsample", net.conv("x", 8, 3), mode="nearest", scales=[1.0, 1.0, 2.0, 3.0])
    b = net.add("Upsample", net.conv(a, 4, 8), mode="linear", scales=[1.0, 1.0, 2.0, 1.0])
    steps = 1.2 if _ROUNDS else 2.2
    return Unusual([net.conv(b, 4, 4)], opset=8, more={"ir_version": 4}, pairs=2, steps=steps)


@file("Pad with negative sides, and along some axes")
def _pads(net: Net) -> Unusual:
    a = net.add("Pad", net.conv("x", 8, 3), net.constant(ints(0, 0, -1, 2, 0, -2, 1, -3)))
    b = net.add("Pad", net.conv(a, 8, 6), net.constant(ints(2, -1)), "", net.constant(ints(-1)), mode="wrap")
    c = net.add("Pad", net.conv(b, 8, 8), net.constant(ints(0, 0, 2, -1, 0, 0, -2, 3)), mode="edge")
    return Unusual([net.conv(c, 4, 8)], opset=19, pairs=4)


@file("Pad by sizes, and Pad by values")
def _computed_pads(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    width = net.add("Shape", a, start=3)
    rest = net.add("Mod", net.add("Neg", width), net.constant(ints(5)))
    b = net.conv(
        net.add(
            "Pad", a, net.add("Concat", net.constant(ints(0) * 0), rest, axis=0), "", net.constant(ints(3))
        ),
        8,
        8,
    )
    top = net.add(
        "ReduceMax",
        net.add("Cast", net.add("Greater", b, net.constant(np.float32(-99))), to=INT64),
        keepdims=0,
    )
    pads = net.add("Concat", net.add("Reshape", top, net.constant(ints(1))), net.constant(ints(2)), axis=0)
    return Unusual(
        [net.add("Pad", b, pads, net.constant(np.float32(0.5)), net.constant(ints(2)), mode="constant")],
        opset=18,
    )


for _opset in (11, 13):

    def _softmax(net: Net, opset: int = _opset) -> Unusual:
        a = net.conv("x", 8, 3)
        b = net.conv(net.add("Softmax", a, axis=1), 8, 8)
        c = net.add("LogSoftmax", net.add("Transpose", b, perm=[0, 2, 3, 1]), axis=2)
        outputs = [net.add("Softmax", a), c, net.add("Hardmax", net.add("Flatten", a))]
        return Unusual(outputs, opset=opset, steps=20, least=10)

    FILES[f"Softmax of opset {_opset} over several axes"] = _softmax


@file("values put to places and taken from there")
def _places(net: Net) -> Unusual:
    a = linear(net, "x", 12, 16)
    b = net.add(
        "ScatterND",
        a,
        net.constant(np.array([[0, 1], [1, -1]])),
        net.constant(floats(2, 16)),
        reduction="add",
    )
    c = net.add("ScatterND", b, net.constant(np.array([[0, 1, 2]])), net.constant(floats(1)), reduction="max")
    d = net.add("ScatterElements", c, "places", net.constant(floats(2, 5, 3)), axis=2, reduction="mul")
    e = net.add("GatherND", d, net.constant(np.array([[-1], [2]])), batch_dims=1)
    f = net.add("Gather", linear(net, d, 16, 8), "rows", axis=1)
    feeds = {"x": floats(2, 5, 12), "places": np.array([[[0, -1, 3]] * 5] * 2), "rows": np.array([-1, 0, 3])}
    inputs: dict[str, Any] = {"x": (FLOAT, [2, 5, 12]), "places": (INT64, [2, 5, 3]), "rows": (INT64, [3])}
    return Unusual([e, f, net.add("GatherElements", d, "places", axis=2)], feeds, inputs, opset=18)


@file("TopK and ArgMax of equal values")
def _ties(net: Net) -> Unusual:
    steps = net.add("Round", net.add("Mul", net.conv("x", 8, 3), net.constant(np.float32(0))))
    flat = net.add(
        "Flatten", net.add("Add", steps, net.constant(np.arange(8, dtype=np.float32).reshape(8, 1, 1) % 3))
    )
    best = net.add("TopK", flat, net.constant(ints(150)), outputs=2)
    least = net.add("TopK", flat, net.constant(ints(9)), largest=0, axis=1, outputs=2)
    last = net.add("ArgMin", flat, axis=1, select_last_index=1)
    y = net.conv(net.add("Reshape", net.add("Slice", best, *(net.constant(ints(v)) for v in (0, 128, 1))),
                         net.constant(ints(0, 2, 8, 8))), 4, 2)  # fmt: skip
    return Unusual([y, f"{best}1", f"{least}1", net.add("ArgMax", flat, axis=1), last], least=10)


@file("CumSum, OneHot and EyeLike")
def _sums(net: Net) -> Unusual:
    hot = net.add(
        "OneHot", "ids", net.constant(np.array(4)), net.constant(np.array([0.5, 2], np.float32)), axis=1
    )
    a = net.add("MatMul", net.add("Transpose", hot, perm=[0, 2, 1]), net.constant(floats(4, 16)))
    b = net.add("CumSum", a, net.constant(np.array(-1)), exclusive=1, reverse=1)
    whole = net.add("CumSum", "ids", net.constant(np.array(1, np.int32)))
    eye = net.add("EyeLike", "square", k=1)
    other = net.add("EyeLike", "square", dtype=int(TensorProto.FLOAT))
    square = net.add("MatMul", other, net.constant(floats(3, 3)))
    inputs: dict[str, Any] = {"ids": (INT64, ["n", 3]), "square": (INT64, [3, 3])}
    feeds = {"ids": np.array([[0, 5, -1], [3, -4, -9]]), "square": np.ones((3, 3), np.int64)}
    return Unusual([linear(net, b, 16, 4), whole, eye, square], feeds, inputs)


@file("NonZero, Unique and Compress on the way")
def _sized_by_values(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    high = net.add("Greater", a, net.constant(np.float32(-99)))
    count = net.add("Shape", net.add("NonZero", high))
    kinds = net.add("Unique", net.add("Cast", high, to=FLOAT), outputs=1)
    kept = net.add("Compress", a, net.constant(np.array([True, False] * 4)), axis=1)
    return Unusual([count, kinds, net.conv(kept, 4, 4)])


@file("reductions of integers, of nothing and of scalars")
def _reductions(net: Net) -> Unusual:
    a = linear(net, "x", 12, 16)
    top = net.add("ReduceMin", a, keepdims=0)
    outputs = [net.add(f"Reduce{name}", top) for name in ("L1", "L2", "SumSquare", "LogSumExp", "Max")]
    outputs += [
        net.add(f"Reduce{name}", "ids", axes=[1], keepdims=0) for name in ("Prod", "Mean", "Max", "SumSquare")
    ]
    outputs += [
        net.add("ReduceSum", a, noop_with_empty_axes=1),
        net.add("ReduceSum", "ids", net.constant(ints())),
    ]
    ids = np.array([[1, 2, 4], [3, -5, 7]], np.int32)
    return Unusual([linear(net, a, 16, 4), *outputs], {"x": floats(2, 12), "ids": ids})


@file("pools of every form")
def _pools(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    outputs = [
        net.add("MaxPool", a, kernel_shape=[3, 3], strides=[2, 3], ceil_mode=1, pads=[1, 0, 1, 1]),
        net.add("MaxPool", a, kernel_shape=[2, 2], dilations=[3, 2], pads=[1, 1, 0, 0]),
        net.add("AveragePool", a, kernel_shape=[3, 3], strides=[2, 3], ceil_mode=1, pads=[0, 1, 1, 0]),
        net.add("AveragePool", a, kernel_shape=[2, 2], dilations=[2, 2]),
        net.add(
            "AveragePool", a, kernel_shape=[3, 3], auto_pad="SAME_LOWER", strides=[2, 2], count_include_pad=1
        ),
        net.add("LpPool", a, kernel_shape=[3, 3], strides=[2, 2], p=1, pads=[1, 1, 1, 1]),
        net.add("LpPool", a, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
        net.add("LpPool", a, kernel_shape=[2, 2], dilations=[2, 1]),
        net.add("GlobalLpPool", a, p=2),
    ]
    return Unusual([net.conv(a, 4, 8), *outputs], opset=19)


@file("MaxPool with places, and MaxUnpool")
def _unpooled(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    pooled = net.add("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2], outputs=2)
    b = net.conv(pooled, 8, 8)
    return Unusual(
        [net.conv(net.add("MaxUnpool", b, f"{pooled}1", kernel_shape=[2, 2], strides=[2, 2]), 4, 8)]
    )


@file("norms of two and three axes, and by computed values")
def _norms(net: Net) -> Unusual:
    a = net.norm(linear(net, net.norm("x", 12), 12, 16), 16)
    b = net.norm(net.add("Unsqueeze", a, net.constant(ints(2))), 16)
    rows = net.add("Squeeze", b, net.constant(ints(2)))
    mean = net.add("ReduceMean", rows, axes=[0], keepdims=0)
    given = net.constant(between(0.5, 1.5, 16)), net.constant(floats(16))
    c = net.add("BatchNormalization", rows, *given, mean, net.constant(between(0.5, 1.5, 16)))
    d = net.add("LayerNormalization", linear(net, c, 16, 8), net.constant(between(0.5, 1.5, 8)), outputs=3)
    return Unusual([linear(net, d, 8, 4), f"{d}1"], {"x": floats(6, 12)}, {"x": (FLOAT, [6, 12])})


@file("slices that run backwards, and splits of uneven parts")
def _slices(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    b = net.add(
        "Slice", a, *(net.constant(np.array(v, np.int32)) for v in ([-1, 9], [-99, 0], [1, -1], [-2, -3]))
    )
    c = net.add(
        "Slice", a, net.constant(ints(3)), net.constant(ints(2)), net.constant(ints(2)), net.constant(ints(1))
    )
    parts = net.add("Split", a, axis=1, num_outputs=3, outputs=3)
    return Unusual([net.conv(b, 4, 4), c, net.conv(f"{parts}2", 4, 2), parts], opset=18)


@file("arithmetic of integers")
def _integers(net: Net) -> Unusual:
    whole = net.add("Cast", net.add("Round", linear(net, "x", 12, 16)), to=INT32)
    seven, two = (net.constant(np.array(v, np.int32)) for v in (7, 2))
    outputs = [net.add("Mod", "k", seven), net.add("Mod", "k", seven, fmod=1), net.add("Div", "k", two),
               net.add("Pow", "k", two), net.add("Max", "k", two), net.add("Clip", "k", two, seven),
               net.add("Relu", "k"), net.add("Sign", "k"), net.add("Abs", "k"), net.add("Sum", "r", "r")]  # fmt: skip
    shifted = net.add("BitShift", "u", net.constant(np.array(1, np.uint8)), direction="RIGHT")
    several = net.add("Mul", "u", net.constant(np.array([5, 3, 1], np.uint8)))
    y = linear(net, net.add("Cast", net.add("Add", whole, two), to=FLOAT), 16, 4)
    feeds = {
        "x": 3 * floats(2, 12),
        "k": np.array([[7, -7, 9]], np.int32),
        "u": np.array([[1, 200, 7]], np.uint8),
        "r": floats(2, 2),
    }
    inputs = {
        "x": (FLOAT, [2, 12]),
        "k": (INT32, [1, 3]),
        "u": (int(TensorProto.UINT8), [1, 3]),
        "r": (FLOAT, [2, 2]),
    }
    return Unusual([y, *outputs, shifted, several], feeds, inputs, least=8)


@file("BatchNormalization in training mode")
def _training(net: Net) -> Unusual:
    given = [
        net.constant(value) for value in (between(0.5, 1.5, 8), floats(8), floats(8), between(0.5, 1.5, 8))
    ]
    a = net.add("BatchNormalization", net.conv("x", 8, 3), *given, training_mode=1, outputs=3)
    return Unusual([net.conv(a, 4, 8)])
