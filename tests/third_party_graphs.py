"""Graphs around the operators of other tools' files: names, outputs, types, subgraphs, computed weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from third_party_files import MS, Array, File, bytes_of, file_of, floats, large, numbers

NUMBERS = numbers()
W = large(18, 18)
X = bytes_of(5, 18)


def product(x: str, y: str, name: str = "", weight: str = "w") -> onnx.NodeProto:
    return helper.make_node("QLinearMatMul", [x, "xs", "xz", weight, "ws", "wz", "ys", "yz"], [y], name)


def with_weight(
    nodes: list[onnx.NodeProto], batches: list[dict[str, Array]] | None = None, *outputs: str
) -> File:
    return file_of(nodes, NUMBERS | {"w": W}, batches or [{"x": X}], outputs or ("y",))


def value(name: str, kind: int = TensorProto.UINT8, rank: int = 2) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [None] * rank)


def graphs() -> Iterator[tuple[str, File]]:
    yield "no names", with_weight([product("x", "a"), product("a", "y")])
    yield (
        "outputs in the middle",
        with_weight([product("x", "a", "1"), product("a", "y", "2")], None, "y", "a"),
    )
    yield (
        "several readers",
        with_weight([product("x", "a", "1"), helper.make_node("Concat", ["a", "a", "x"], ["c"], axis=0),
                     product("c", "b", "2"), helper.make_node("Max", ["b", "c"], ["y"])]),
    )  # fmt: skip
    yield (
        "a constant as output",
        file_of([product("x", "y", "1"), helper.make_node("Identity", ["k"], ["z"])],
                NUMBERS | {"w": W, "k": np.arange(3.0)}, [{"x": X}], ("y", "z")),
    )  # fmt: skip
    yield (
        "an input as output, and an input that nobody reads",
        file_of([product("x", "y", "1"), helper.make_node("Identity", ["k"], ["z"])],
                NUMBERS | {"w": W}, [{"x": X, "k": np.arange(3.0), "unused": np.zeros(2)}], ("y", "z")),
    )  # fmt: skip
    floating = [helper.make_node("Cast", [name], [f"{name}f"], to=TensorProto.FLOAT) for name in ("x", "b")]
    yield (
        "a sequence",
        with_weight([floating[0], helper.make_node("SequenceConstruct", ["xf", "xf"], ["s"]), product("x", "b", "1"),
                     floating[1], helper.make_node("SequenceInsert", ["s", "bf"], ["t"]), product("b", "c", "2"),
                     helper.make_node("ConcatFromSequence", ["t"], ["y"], axis=0)], None, "y", "c"),
    )  # fmt: skip
    half = helper.make_node("Cast", ["x"], ["h"], to=TensorProto.BFLOAT16)
    yield (
        "a type that NumPy lacks",
        with_weight([half, product("x", "a", "1"), helper.make_node("Cast", ["h"], ["u"], to=TensorProto.UINT8),
                     helper.make_node("Max", ["a", "u"], ["y"])]),
    )  # fmt: skip
    strings = helper.make_node("Cast", ["x"], ["t"], to=TensorProto.STRING)
    yield (
        "strings",
        with_weight(
            [strings, product("x", "a", "1"), helper.make_node("Identity", ["t"], ["z"])], None, "a", "z"
        ),
    )
    yield (
        "an empty tensor on the way",
        with_weight([helper.make_node("NonZero", ["x"], ["n"]), product("x", "a", "1"),
                     helper.make_node("Shape", ["n"], ["s"]), helper.make_node("Cast", ["s"], ["y"], to=1),
                     helper.make_node("Relu", ["y"], ["z"])],
                    [{"x": X}, {"x": np.zeros((0, 18), np.uint8)}, {"x": np.zeros((2, 18), np.uint8)}], "a", "z"),
    )  # fmt: skip
    yield (
        "an unknown rank",
        with_weight([helper.make_node("Reshape", ["x", "shape"], ["r"]), product("r", "a", "1"),
                     helper.make_node("Transpose", ["a"], ["y"])],
                    [{"x": X, "shape": np.array([5, 18])}, {"x": X, "shape": np.array([1, 5, 18])}]),
    )  # fmt: skip
    yield from _weights()
    yield from _subgraphs()


def _weights() -> Iterator[tuple[str, File]]:
    identity = helper.make_node("Identity", ["w"], ["v"])
    yield "a weight behind Identity", with_weight([identity, product("x", "y", "1", "v")])
    constant = helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(W))
    yield "a weight in a Constant", with_weight([constant, product("x", "y", "1", "v")])
    turned = helper.make_node("Transpose", ["w"], ["v"])
    yield "a weight that is turned", with_weight([turned, product("x", "y", "1", "v")])
    fed = file_of([product("x", "y", "1")], NUMBERS, [{"x": X, "w": W}])
    yield "a weight that is fed", fed._replace(others=("1 (its int8 operand is computed)",))
    made = helper.make_node("Abs", ["w"], ["v"])
    node = helper.make_node("MatMulInteger", ["x", "v"], ["y"], "1")
    fed = file_of([made, node], {}, [{"x": X, "w": W}])
    yield (
        "integers by what is computed",
        fed._replace(others=("1 (its second operand is computed, and may be int8)",)),
    )
    both = file_of(
        [helper.make_node("DynamicQuantizeLinear", [one], [f"{one}q", f"{one}s", f"{one}z"]) for one in "ab"]
        + [helper.make_node("MatMulInteger", ["aq", "bq", "az", "bz"], ["y"], "1")],
        {}, [{"a": floats(3, 5), "b": floats(5, 4)}],
    )  # fmt: skip
    yield "uint8 x uint8, dynamic", both
    overridden = with_weight([product("x", "y", "1")])
    overridden.model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.INT8, W.shape))
    yield "an initializer that is an input too", overridden


def _subgraphs() -> Iterator[tuple[str, File]]:
    then = helper.make_graph([product("a", "b", "inner")], "then", [], [value("b")])
    weights = [numpy_helper.from_array(large(18, 18, seed=9), "own")]
    other = helper.make_graph(
        [product("a", "b", "", "own"), product("b", "c", "inner")], "else", [], [value("c")], weights
    )
    choice = helper.make_node("If", ["k"], ["d"], "if", then_branch=then, else_branch=other)
    batches = [{"x": X, "k": np.array(k)} for k in (True, False)]
    yield "an If", with_weight([product("x", "a", "outer"), choice, product("d", "y", "last")], batches)
    nested = helper.make_graph([choice], "then", [], [value("d")])
    constant = helper.make_graph([helper.make_node("Identity", ["x"], ["e"])], "else", [], [value("e")])
    outer = helper.make_node("If", ["l"], ["y"], "outer if", then_branch=nested, else_branch=constant)
    batches = [{"x": X, "k": np.array(k), "l": np.array(j)} for k in (True, False) for j in (True, False)]
    yield "an If in an If", with_weight([product("x", "a", "outer"), outer], batches)
    body = helper.make_graph(
        [product("v", "u", "inner"), helper.make_node("Identity", ["c"], ["d"])], "body",
        [value("i", TensorProto.INT64, 0), value("c", TensorProto.BOOL, 0), value("v")],
        [value("d", TensorProto.BOOL, 0), value("u")],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["n", "", "a"], ["y"], "loop", body=body)
    looped = with_weight([product("x", "a", "outer"), loop], [{"x": X, "n": np.array(2)}])
    yield "a Loop", looped._replace(others=("inner (in the body of a Loop)",))
    function = helper.make_function(
        "own", "Twice", ["p", "w", "xs", "xz", "ws", "wz", "ys", "yz"], ["r"],
        [product("p", "q", "a"), product("q", "r", "b")], [helper.make_opsetid("", 17)],
    )  # fmt: skip
    call = helper.make_node(
        "Twice", ["a", "w", "xs", "xz", "ws", "wz", "ys", "yz"], ["b"], "call 1", domain="own"
    )
    again = helper.make_node(
        "Twice", ["b", "w", "xs", "xz", "ws", "wz", "ys", "yz"], ["y"], "call 2", domain="own"
    )
    yield (
        "a function",
        file_of([product("x", "a", "1"), call, again], NUMBERS | {"w": W}, [{"x": X}], functions=(function,)),
    )
    yield from _judged()


def _judged() -> Iterator[tuple[str, File]]:
    for name, limit in (("can", 127), ("cannot", 64)):
        hidden, inputs = 16, 32
        stored: dict[str, Any] = {
            "W": np.clip(large(1, inputs, 4 * hidden), -limit, limit),
            "R": np.clip(large(1, hidden, 4 * hidden), -limit, limit),
            "Ws": np.array([1e-4], np.float32), "Wz": np.array([0], np.int8),
            "Rs": np.array([1e-3], np.float32), "Rz": np.array([0], np.int8),
        }  # fmt: skip
        names = ["x", "W", "R", "", "", "", "", "", "Ws", "Wz", "Rs", "Rz"]
        node = helper.make_node("DynamicQuantizeLSTM", names, ["y"], "lstm", domain=MS, hidden_size=hidden)
        lstm = file_of([node], stored, [{"x": floats(3, 2, inputs)}])
        told = "lstm (only the weights of a DynamicQuantizeLSTM are judged)"
        yield f"an LSTM that {name} saturate", lstm._replace(others=(told,) if limit == 127 else ())
        stored = {
            "w": np.clip(large(32, 96), -limit, limit), "b": np.zeros(96, np.float32), "as": np.float32(0.01),
            "ws": np.float32(0.001), "az": np.uint8(0), "wz": np.int8(0),
        }  # fmt: skip
        names = ["x", "w", "b", "as", "ws", "", "az", "wz"]
        node = helper.make_node("QAttention", names, ["y"], "attention", domain=MS, num_heads=4)
        told = "attention (only the weights of a QAttention are judged)"
        attention = file_of([node], stored, [{"x": bytes_of(2, 5, 32)}])
        yield f"attention that {name} saturate", attention._replace(others=(told,) if limit == 127 else ())
