"""ONNX files with parts that PyTorch cannot compute (islands), most of them between two convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx_models import BOOL, FLOAT, INT64, Array, save

_RANDOM = np.random.default_rng(7)


def floats(*shape: int) -> Array:
    """Returns normally distributed values."""
    return _RANDOM.normal(0, 1, shape).astype(np.float32)


IMAGE: Array = floats(2, 3, 8, 8)
_WEIGHTS = {"w0": floats(4, 3, 3, 3) / 5, "w1": floats(4, 4, 3, 3) / 6, "b1": floats(4) / 4}
_ANY: Sequence[Any] = ("N", 3, 8, 8)


def node(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    """Returns a node named after its first output."""
    return helper.make_node(operator, inputs, outputs, f"/{outputs[0]}/{operator}", **attributes)


def info(name: str, kind: int = FLOAT, shape: Sequence[Any] | None = None) -> onnx.ValueInfoProto:
    """Returns the value info of an input or output of a subgraph, such as the body of a Loop."""
    return helper.make_tensor_value_info(name, kind, shape)


def _between(
    path: Path, middle: Sequence[onnx.NodeProto], constants: Mapping[str, Array] | None = None, **more: Any
) -> Path:
    """Writes a file: a Conv with output `a`, the nodes `middle`, which compute `m`, and a Conv of `m`."""
    nodes = [
        node("Conv", ["x", "w0"], ["a"], pads=[1, 1, 1, 1]),
        *middle,
        node("Conv", ["m", "w1", "b1"], ["y"], pads=[1, 1, 1, 1]),
    ]
    given = {**_WEIGHTS, **(constants or {})}
    return save(path, nodes, {"x": (FLOAT, _ANY)}, ["y"], given, **more)


def loop(path: Path) -> Path:
    """Writes a file with a Loop: the trip count is computed, and the body reads a tensor from outside."""
    body = helper.make_graph(
        [
            node("Mul", ["state", "decay"], ["scaled"]),
            node("Add", ["scaled", "a"], ["next"]),
            node("Identity", ["going"], ["on"]),
        ],
        "body",
        [info("i", INT64, []), info("going", BOOL, []), info("state")],
        [info("on", BOOL, []), info("next")],
    )
    middle = [
        node("Size", ["a"], ["size"]),
        node("Mod", ["size", "three"], ["count"]),
        node("Add", ["count", "two"], ["trips"]),
        node("Loop", ["trips", "true", "a"], ["m"], body=body),
    ]
    constants = {"decay": floats(4, 1, 1), "three": np.array(3), "two": np.array(2), "true": np.array(True)}
    return _between(path, middle, constants)


def scan(path: Path) -> Path:
    """Writes a file with a Scan over the rows of an image."""
    body = helper.make_graph(
        [node("Add", ["sum", "row"], ["next"]), node("Tanh", ["next"], ["out"])],
        "body",
        [info("sum", FLOAT, ["N", 4, 8]), info("row", FLOAT, ["N", 4, 8])],
        [info("next", FLOAT, ["N", 4, 8]), info("out", FLOAT, ["N", 4, 8])],
    )
    middle = [
        node("ReduceMin", ["a"], ["least"], axes=[2], keepdims=0),
        node(
            "Scan", ["least", "a"], ["last", "m"], body=body, num_scan_inputs=1, scan_input_axes=[2],
            scan_output_axes=[2],
        ),
    ]  # fmt: skip
    return _between(path, middle)


def condition(path: Path) -> Path:
    """Writes a file with an If whose condition depends on values, with a convolution in each branch."""

    def branch(weight: str) -> onnx.GraphProto:
        made = node("Conv", ["a", weight], [f"in_{weight}"], pads=[1, 1, 1, 1])
        return helper.make_graph([made], weight, [], [info(f"in_{weight}")])

    middle = [
        node("ReduceSum", ["a"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["positive"]),
        node("If", ["positive"], ["m"], then_branch=branch("w2"), else_branch=branch("w3")),
    ]
    constants: dict[str, Array] = {"w2": floats(4, 4, 3, 3) / 6, "w3": floats(4, 4, 3, 3) / 6}
    constants["zero"] = np.array(0, np.float32)
    return _between(path, middle, constants)


def contrib(path: Path) -> Path:
    """Writes a file with a com.microsoft operator that the importer cannot translate to PyTorch."""
    middle = [
        node("Add", ["a", "diagonal"], ["regular"]),
        helper.make_node("Inverse", ["regular"], ["m"], "/inverse", domain="com.microsoft"),
    ]
    constants = {"diagonal": 10 * np.eye(8, dtype=np.float32)}
    return _between(path, middle, constants, imports=[helper.make_opsetid("com.microsoft", 1)])


def values_of_some_images(path: Path) -> Path:
    """Writes a file with a Compress that selects images by their values, before a convolution."""
    middle = [
        node("ReduceMax", ["a"], ["most"], axes=[1, 2, 3], keepdims=0),
        node("Greater", ["most", "limit"], ["chosen"]),
        node("Compress", ["a", "chosen"], ["some"], axis=0),
        node("Relu", ["some"], ["m"]),
    ]
    return _between(path, middle, {"limit": np.array(-1.0, np.float32)})


def largest(path: Path) -> Path:
    """Writes a file with a TopK whose k is computed from values and becomes the width of the image."""
    middle = [
        node("Greater", ["a", "limit"], ["chosen"]),
        node("Cast", ["chosen"], ["whole"], to=INT64),
        node("ReduceMax", ["whole"], ["one"], keepdims=0),
        node("Mul", ["one", "six"], ["six_of_them"]),
        node("Reshape", ["six_of_them", "vector"], ["k"]),
        node("TopK", ["a", "k"], ["m", "places"], axis=3),
    ]
    constants = {"limit": np.array(-9.0, np.float32), "six": np.array(6), "vector": np.array([1])}
    return _between(path, middle, constants)


def sequences(path: Path) -> Path:
    """Writes a file that splits a tensor into a sequence and concatenates its parts in another order."""
    middle = [
        node("SplitToSequence", ["a", "one"], ["parts"], axis=1),
        node("SequenceAt", ["parts", "first"], ["head"]),
        node("SequenceErase", ["parts", "first"], ["rest"]),
        node("SequenceInsert", ["rest", "head"], ["turned"]),
        node("ConcatFromSequence", ["turned"], ["m"], axis=1),
    ]
    return _between(path, middle, {"one": np.array(1), "first": np.array(0)})


def boxes(path: Path) -> Path:
    """Writes a file with a detection head: NonMaxSuppression filters scores and boxes from convolutions."""
    nodes = [
        node("Conv", ["x", "w0"], ["a"], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["r"]),
        node("Conv", ["r", "w1", "b1"], ["corners"], pads=[1, 1, 1, 1]),
        node("Conv", ["r", "w2"], ["classes"], pads=[1, 1, 1, 1]),
        node("Reshape", ["corners", "flat4"], ["c4"]),
        node("Transpose", ["c4"], ["found"], perm=[0, 2, 1]),
        node("Reshape", ["classes", "flat2"], ["c2"]),
        node("Sigmoid", ["c2"], ["scores"]),
        node("NonMaxSuppression", ["found", "scores", "most", "overlap", "least"], ["kept"]),
        node("Gather", ["kept", "two"], ["places"], axis=1),
        node("Squeeze", ["places", "axis1"], ["place"]),
        node("Gather", ["found", "place"], ["best"], axis=1),
    ]
    constants = {
        **_WEIGHTS,
        "w2": floats(2, 4, 3, 3) / 6,
        "flat4": np.array([0, 4, -1]),
        "flat2": np.array([0, 2, -1]),
        "most": np.array([5]),
        "overlap": np.array([0.5], np.float32),
        "least": np.array([0.2], np.float32),
        "two": np.array([2]),
        "axis1": np.array([1]),
    }
    return save(path, nodes, {"x": (FLOAT, _ANY)}, ["best", "kept", "scores"], constants)


def words(path: Path) -> Path:
    """Writes a file with an embedding lookup by codes of strings, which the input selects from a table."""
    table = numpy_helper.from_array(np.array(["ZERO", "One", "two"], object), "table")
    nodes = [
        node("Constant", [], ["table"], value=table),
        node("Gather", ["table", "ids"], ["spoken"]),
        node("StringNormalizer", ["spoken"], ["lower"], case_change_action="LOWER", locale="C"),
        helper.make_node(
            "LabelEncoder", ["lower"], ["codes"], "/codes", domain="ai.onnx.ml",
            keys_strings=["zero", "one", "two"], values_int64s=[2, 0, 1],
        ),
        node("Gather", ["rows", "codes"], ["found"]),
        node("MatMul", ["found", "w"], ["y"]),
    ]  # fmt: skip
    constants = {"rows": floats(3, 16), "w": floats(16, 8)}
    imports = [helper.make_opsetid("ai.onnx.ml", 3)]
    return save(path, nodes, {"ids": (INT64, ["N"])}, ["y"], constants, imports=imports)


def hashes(path: Path) -> Path:
    """Writes a file with an embedding lookup by the hashes of integer ids."""
    nodes = [
        helper.make_node("MurmurHash3", ["ids"], ["hash"], "/hash", domain="com.microsoft", positive=1),
        node("Cast", ["hash"], ["wide"], to=INT64),
        node("Mod", ["wide", "buckets"], ["bucket"]),
        node("Gather", ["rows", "bucket"], ["found"]),
        node("MatMul", ["found", "w"], ["y"]),
    ]
    constants = {"rows": floats(11, 16), "w": floats(16, 8), "buckets": np.array(11)}
    imports = [helper.make_opsetid("com.microsoft", 1)]
    return save(path, nodes, {"ids": (TensorProto.INT32, ["N", 6])}, ["y"], constants, imports=imports)


def lengths(path: Path) -> Path:
    """Writes a file with a GRU between two MatMuls; the lengths of the sequences are an input."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node(
            "GRU", ["h", "wi", "wr", "b", "lengths"], ["states", "last"], hidden_size=6, linear_before_reset=1
        ),
        node("Squeeze", ["states", "axis1"], ["s"]),
        node("MatMul", ["s", "v"], ["y"]),
    ]
    constants = {
        "w": floats(5, 8),
        "wi": floats(1, 18, 8) / 3,
        "wr": floats(1, 18, 6) / 3,
        "b": floats(1, 36) / 3,
        "axis1": np.array([1]),
        "v": floats(6, 4),
    }
    inputs: dict[str, Any] = {"x": (FLOAT, [7, "N", 5]), "lengths": (TensorProto.INT32, ["N"])}
    return save(path, nodes, inputs, ["y"], constants)


def turned_back(path: Path) -> Path:
    """Writes a file with a SequenceAt whose index, that of the last part, is computed in the island too."""
    middle = [
        node("SplitToSequence", ["a", "one"], ["parts"], axis=1),
        node("SequenceLength", ["parts"], ["length"]),
        node("Sub", ["length", "one"], ["last"]),
        node("SequenceAt", ["parts", "last"], ["part"]),
        node("Concat", ["part", "part", "part", "part"], ["m"], axis=1),
    ]
    return _between(path, middle, {"one": np.array(1)})


def sizes_of_some_images(path: Path) -> Path:
    """Writes a file with a Reshape to sizes that depend on values."""
    middle = [
        node("ReduceMax", ["a"], ["most"], axes=[1, 2, 3], keepdims=0),
        node("Greater", ["most", "limit"], ["chosen"]),
        node("Compress", ["a", "chosen"], ["some"], axis=0),
        node("Shape", ["some"], ["sizes"]),
        node("Reshape", ["some", "flat"], ["row"]),
        node("Mul", ["row", "two"], ["twice"]),
        node("Reshape", ["twice", "sizes"], ["m"]),
    ]
    constants: dict[str, Array] = {"limit": np.array(-1, np.float32), "two": np.array(2, np.float32)}
    return _between(path, middle, {**constants, "flat": np.array([-1])})


def in_a_branch(path: Path) -> Path:
    """Writes a file with an If whose condition depends on a size, with NonZero in the branch taken."""
    taken = [
        node("NonZero", ["a"], ["places"]),
        node("Cast", ["places"], ["numbers"], to=FLOAT),
        node("ReduceMean", ["numbers"], ["mean"], keepdims=0),
        node("Mul", ["a", "mean"], ["scaled"]),
    ]
    other = [node("Relu", ["a"], ["positive"])]
    middle = [
        node("Shape", ["a"], ["sizes"], start=2, end=3),
        node("Squeeze", ["sizes"], ["height"]),
        node("Greater", ["height", "five"], ["tall"]),
        node(
            "If", ["tall"], ["m"],
            then_branch=helper.make_graph(taken, "taken", [], [info("scaled")]),
            else_branch=helper.make_graph(other, "other", [], [info("positive")]),
        ),
    ]  # fmt: skip
    return _between(path, middle, {"five": np.array(5)})


def a_number_in_words(path: Path) -> Path:
    """Writes a file with a constant string that is cast to a number."""
    middle = [
        node("Constant", [], ["word"], value_string="1.5"),
        node("Cast", ["word"], ["number"], to=FLOAT),
        node("Mul", ["a", "number"], ["m"]),
    ]
    return _between(path, middle)


def old(path: Path) -> Path:
    """Writes a file of opset 9, which has no QuantizeLinear."""
    nodes = [
        node("Conv", ["x", "w0"], ["a"], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["r"]),
        node("NonZero", ["r"], ["places"]),
        node("Cast", ["places"], ["numbers"], to=FLOAT),
        node("Conv", ["r", "w1"], ["y"], pads=[1, 1, 1, 1]),
    ]
    constants = {name: _WEIGHTS[name] for name in ("w0", "w1")}
    return save(path, nodes, {"x": (FLOAT, _ANY)}, ["y", "numbers"], constants, opset=9)
