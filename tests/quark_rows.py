"""The rows of docs/quark.md, and the small networks that their commands run on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import pytest
from clean_nets import Arrays, drawn, save
from command_line import ROOT
from onnx import numpy_helper

PAGE = (ROOT / "docs" / "quark.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")
# Name of the test that runs the row of each option.
RUN: dict[str, str] = {}
F = TypeVar("F", bound=Callable[..., Any])


def page_rows() -> Iterator[list[str]]:
    """Yields the cells of each row."""
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


KEYS = {option: CODE.findall(row[1]) for row in page_rows() for option in CODE.findall(row[0])}


def runs(*options: str) -> Callable[[F], F]:
    """Marks a slow test that uses the keys of these rows."""

    def mark(test: F) -> F:
        for option in options:
            assert RUN.setdefault(option, test.__name__) == test.__name__, f"{option} is run twice"
        test.__dict__["options"] = options
        marked: F = pytest.mark.slow(test)
        return marked

    return mark


def not_typed(options: tuple[str, ...], typed: list[str]) -> list[str]:
    """Returns the keys of these rows that no command used."""
    known = {one.lstrip("+").partition("=")[0] for one in typed}
    whole = " ".join(typed)
    missing = []
    for key in (code.partition("=")[0] for option in options for code in KEYS[option]):
        if key.startswith("backend.overrides"):
            last = key.rpartition(".")[2]
            found = "backend.overrides" in whole and (last == "overrides" or f"{last}:" in whole)
        else:
            found = key in known
        if not found:
            missing.append(key)
    return missing


def initializers(model: onnx.ModelProto) -> dict[str, Any]:
    """Returns the file's initializers by name."""
    return {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}


def makers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Returns the node that produces each tensor."""
    return {name: node for node in model.graph.node for name in node.output}


def behind(model: onnx.ModelProto, kind: str) -> set[str]:
    """Returns the types of the consumers of a node type's outputs; "" for an output of the file."""
    made = {name for node in model.graph.node if node.op_type == kind for name in node.output}
    ends = {""} if made & {one.name for one in model.graph.output} else set()
    return {node.op_type for node in model.graph.node if made & set(node.input)} | ends


def before(model: onnx.ModelProto, kind: str, place: int = 0) -> set[str]:
    """Returns the types of the producers of a node type's input; "" if no node produces it."""
    known = makers(model)
    read = [node.input[place] for node in model.graph.node if node.op_type == kind]
    return {known[name].op_type if name in known else "" for name in read}


def pair_of(model: onnx.ModelProto, node: onnx.NodeProto, place: int) -> tuple[Any, Any, Any]:
    """Returns (integers or None, scale, zero_point or None) of the DequantizeLinear at an input of a node."""
    found, held = makers(model)[node.input[place]], initializers(model)
    assert found.op_type == "DequantizeLinear", f"{node.name} reads {found.op_type}"
    point = held.get(found.input[2]) if len(found.input) > 2 else None
    return held.get(found.input[0]), held[found.input[1]], point


def nodes(model: onnx.ModelProto, kind: str) -> list[onnx.NodeProto]:
    """Returns the nodes of a type, in order."""
    return [node for node in model.graph.node if node.op_type == kind]


# Convolutions followed by different activations; sums, products, a concatenation and pools.
_MIXED = """<ir_version: 8, opset_import: ["" : 17]> net (float[batch, 3, 12, 12] x) => (float[batch, 5] y) {
  c1 = Conv <pads: ints = [1, 1, 1, 1]> (x, w1, b1)  n1 = BatchNormalization (c1, ns, nb, nm, nv)  r1 = Relu (n1)
  c2 = Conv (r1, w2, b2)  r2 = LeakyRelu <alpha: float = 0.1> (c2)
  c3 = Conv (r2, w3, b3)  r3 = PRelu (c3, slope)
  c4 = Conv (r3, w2, b3)  low = Constant <value_float: float = 0.0> ()  high = Constant <value_float: float = 6.0> ()
  r4 = Clip (c4, low, high)  c5 = Conv (r4, w3, b3)
  k = Constant <value_float: float = 1.4142135> ()  one = Constant <value_float: float = 1.0> ()
  half = Constant <value_float: float = 0.5> ()  d = Div (c5, k)  e = Erf (d)  f = Add (e, one)  g = Mul (c5, f)
  r5 = Mul (g, half)
  m = Mul (r5, r1)  s = Add (m, r2)  i = InstanceNormalization (s, is, ib)  r6 = Relu (i)
  p = MaxPool <kernel_shape: ints = [2, 2], strides: ints = [2, 2]> (r6)
  p2 = AveragePool <kernel_shape: ints = [2, 2], strides: ints = [2, 2]> (r4)  j = Concat <axis: int = 1> (p, p2)
  h = HardSigmoid <alpha: float = 0.16666667, beta: float = 0.5> (j)  q = Mul (j, h)
  a = GlobalAveragePool (q)  t = Flatten (a)  u = Gemm <transB: int = 1> (t, wf, bf)  y = MatMul (u, wm)
}"""
_MIXED_WEIGHTS: Arrays = {
    "w1": drawn(8, 3, 3, 3, seed=1) / 5, "b1": drawn(8, seed=2), "w2": drawn(8, 8, 1, 1, seed=3) / 3,
    "w3": drawn(8, 8, 1, 1, seed=5) / 3, "b2": drawn(8, seed=4) / 4, "b3": drawn(8, seed=6) / 4,
    "ns": np.abs(drawn(8, seed=7)) + np.float32(0.5), "nb": drawn(8, seed=8), "nm": drawn(8, seed=9),
    "nv": np.abs(drawn(8, seed=10)) + np.float32(0.5), "slope": np.abs(drawn(8, 1, 1, seed=11)) / 4,
    "is": np.abs(drawn(8, seed=12)) + np.float32(0.5), "ib": drawn(8, seed=13), "wf": drawn(16, 16, seed=14) / 4,
    "bf": drawn(16, seed=15), "wm": drawn(16, 5, seed=16) / 4,
}  # fmt: skip

# Convolutions, pools and a classifier.
_PLAIN = """<ir_version: 8, opset_import: ["" : 17]> net (float[batch, 3, 12, 12] x) => (float[batch, 5] y) {
  c1 = Conv <pads: ints = [1, 1, 1, 1]> (x, w1, b1)  r1 = Relu (c1)  c2 = Conv (r1, w2, b2)  r2 = Relu (c2)
  p = MaxPool <kernel_shape: ints = [2, 2], strides: ints = [2, 2]> (r2)  a = GlobalAveragePool (p)  t = Flatten (a)
  y = Gemm <transB: int = 1> (t, wf, bf)
}"""
_PLAIN_WEIGHTS = {name: _MIXED_WEIGHTS[name] for name in ("w1", "b1", "w2", "b2")} | {
    "wf": drawn(5, 8, seed=17),
    "bf": drawn(5, seed=18),
}


def mixed(folder: Path) -> Path:
    """Writes a network with all the activations that rows mention."""
    return _named(save(folder / "mixed.onnx", _MIXED, _MIXED_WEIGHTS))


def plain(folder: Path) -> Path:
    """Writes two convolutions and a Gemm."""
    return _named(save(folder / "plain.onnx", _PLAIN, _PLAIN_WEIGHTS))


# One part for each rewrite, with an output of its own.
PARTS = """<ir_version: 8, opset_import: ["" : 20]> net (float[batch, 6, 36, 30] x)
  => (float[a] y1, float[a] y2, float[a] y3, float[a] y4, float[a] y5, float[a] y6, float[a] y7, float[a] y8) {
  last = Constant <value_ints: ints = [-1]> ()  both = Constant <value_ints: ints = [2, 3]> ()
  e = Constant <value_float: float = 0.01> ()  two = Constant <value_float: float = 2.0> ()
  m1 = ReduceMean (x, last)  d1 = Sub (x, m1)  q1 = Pow (d1, two)  v1 = ReduceMean (q1, last)  s1 = Add (v1, e)
  r1 = Sqrt (s1)  y1 = Div (d1, r1)
  m2 = ReduceMean (x, both)  d2 = Sub (x, m2)  q2 = Mul (d2, d2)  v2 = ReduceMean (q2, both)  s2 = Add (v2, e)
  r2 = Sqrt (s2)  i2 = Reciprocal (r2)  n2 = Mul (i2, d2)  g2 = Mul (w, n2)  y2 = Add (g2, b)
  axes = Constant <value_ints: ints = [1]> ()  s3 = ReduceL2 (x, axes)  t3 = Constant <value_float: float = 1.0e-12> ()
  c3 = Clip (s3, t3)  h3 = Shape (x)  e3 = Expand (c3, h3)  y3 = Div (x, e3)
  k4 = Constant <value_float: float = 1.4142135> ()  one = Constant <value_float: float = 1.0> ()
  half = Constant <value_float: float = 0.5> ()  d4 = Div (x, k4)  e4 = Erf (d4)  a4 = Add (e4, one)  p4 = Mul (x, a4)
  y4 = Mul (p4, half)
  zero = Constant <value_float: float = 0.0> ()  c5 = Clip (x, zero)  y5 = BatchNormalization (c5, ns, nb, nm, nv)
  y6 = ReduceMean <keepdims: int = 1> (x, both)
  a7, b7, c7 = Split <axis: int = 1, num_outputs: int = 3> (x)  j7 = Concat <axis: int = 1> (c7, a7)
  y7 = GlobalAveragePool (j7)
  f8 = Conv <kernel_shape: ints = [1, 1]> (x, f)  h8 = Conv <kernel_shape: ints = [1, 1]> (x, g)
  j8 = Concat <axis: int = 1> (f8, h8)  y8 = BatchNormalization (j8, ns, nb, nm, nv)
}"""
PART_WEIGHTS: Arrays = {
    "w": drawn(1, 6, 1, 1, seed=1), "b": drawn(6, 1, 1, seed=2), "ns": drawn(6, seed=3), "nb": drawn(6, seed=4),
    "nm": drawn(6, seed=5), "nv": drawn(6, seed=6) ** 2 + np.float32(0.1), "f": drawn(2, 6, 1, 1, seed=7),
    "g": drawn(4, 6, 1, 1, seed=8),
}  # fmt: skip

# Operators that an NPU computes differently.
APPROXIMATED = """<ir_version: 8, opset_import: ["" : 18]> net (float[2, 3, 6, 6] x) => (float[a, b, c, d] y) {
  zero = Constant <value_float: float = 0.0> ()  six = Constant <value_float: float = 6.0> ()
  low = Constant <value_float: float = -1.6> ()  high = Constant <value_float: float = 3.2> ()
  a = LeakyRelu <alpha: float = 0.1> (x)  b = Clip (a, zero, six)  c = Sigmoid (b)
  d = HardSigmoid <alpha: float = 0.16666667, beta: float = 0.5> (a)  e = Mul (c, d)
  f = AveragePool <kernel_shape: ints = [3, 3], strides: ints = [3, 3]> (e)  g = Clip (f, low, high)
  h = Softmax <axis: int = 1> (g)  axes = Constant <value_ints: ints = [2, 3]> ()  y = ReduceMean (h, axes)
}"""

# Foldable constants, duplicates, a BatchNormalization, and an initializer with several readers.
UNTIDY = """<ir_version: 8, opset_import: ["" : 13]> net (float[batch, 3, h, 8] x) => (float[batch, 4, h, 8] y) {
  c = Conv <kernel_shape: ints = [1, 1]> (x, w, b)  n = BatchNormalization (c, s, b, b, v)  i = Identity (n)
  one = Constant <value_float: float = 1.0> ()  two = Add (one, one)  p = Mul (i, two)  q = Mul (i, two)
  y = Add (p, q)
}"""
UNTIDY_WEIGHTS: Arrays = {
    "w": drawn(4, 3, 1, 1, seed=1), "b": drawn(4, seed=2), "s": np.abs(drawn(4, seed=3)) + np.float32(0.5),
    "v": np.abs(drawn(4, seed=4)) + np.float32(0.5),
}  # fmt: skip


# Products with weights and products of two activations.
_ATTENTION = """<ir_version: 8, opset_import: ["" : 17]> net (float[batch, 6, 16] x) => (float[batch, 6, 5] y) {
  a = MatMul (x, w1)  b = MatMul (x, w2)  t = Transpose <perm: ints = [0, 2, 1]> (b)  s = MatMul (a, t)
  p = Softmax <axis: int = -1> (s)  c = MatMul (p, a)  y = MatMul (c, w3)
}"""

# Activations after convolutions that stay separate operators.
_ACTIVATED = """<ir_version: 8, opset_import: ["" : 20]> net (float[batch, 3, 8, 8] x) => (float[batch, 8, 8, 8] y) {
  c1 = Conv <pads: ints = [1, 1, 1, 1]> (x, w1, b1)  r1 = LeakyRelu <alpha: float = 0.1> (c1)  c2 = Conv (r1, w2, b2)
  r2 = PRelu (c2, slope)  c3 = Conv (r2, w3, b3)  r3 = Gelu (c3)  i = InstanceNormalization (r3, is, ib)
  r4 = LeakyRelu <alpha: float = 0.2> (i)  c4 = Conv (r4, w2, b3)  h = HardSigmoid <alpha: float = 0.16666667> (c4)
  m = Mul (h, r1)  y = Add (m, r2)
}"""


def _named(path: Path) -> Path:
    """Names each node after its output."""
    model = onnx.load(path)
    for node in model.graph.node:
        node.name = f"/net/{node.output[0]}"
    onnx.save(model, path)
    return path


def attention(folder: Path) -> Path:
    """Writes products of two activations between products with weights."""
    weights = {
        "w1": drawn(16, 16, seed=1) / 4,
        "w2": drawn(16, 16, seed=2) / 4,
        "w3": drawn(16, 5, seed=3) / 4,
    }
    return _named(save(folder / "attention.onnx", _ATTENTION, weights))


def activated(folder: Path) -> Path:
    """Writes a network whose activations are not fused into convolutions in qatkit's files."""
    return _named(save(folder / "activated.onnx", _ACTIVATED, _MIXED_WEIGHTS))
