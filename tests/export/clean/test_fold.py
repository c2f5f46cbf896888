"""Tests of folding: constants, nodes without effect, duplicates, subgraphs and functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from clean_nets import Arrays, cleaned, drawn, kinds, reference, run, save
from onnx import TensorProto, helper, numpy_helper

HEAD = '<ir_version: 8, opset_import: ["" : 13]>'
NORMED = f"""{HEAD.replace("13", "17")} net (float[1, 3, 8, 8] x) => (float[1, 4, 8, 8] y) {{
  same = Identity (x)
  kept, mask = Dropout (same)
  unread = Sin (kept)
  c = Conv <pads = [1, 1, 1, 1]> (kept, w)
  n = BatchNormalization (c, scale, shift, mean, variance)
  a = Relu (n)
  b = Relu (n)
  y = Add (a, b)
}}"""


def test_what_does_nothing_goes_and_batchnorm_joins_its_conv(tmp_path: Path) -> None:
    weights: Arrays = {"w": drawn(4, 3, 3, 3), "scale": drawn(4), "shift": drawn(4), "mean": drawn(4),
               "variance": np.abs(drawn(4)) + 0.5, "unread_weight": drawn(1000)}  # fmt: skip
    net = save(tmp_path / "net.onnx", NORMED, weights)
    found, model = cleaned(net, fold="all")
    assert kinds(model) == ["Conv", "Relu", "Add"]
    assert sorted(tuple(one.dims) for one in model.graph.initializer) == [(4,), (4, 3, 3, 3)]
    feeds = {"x": drawn(1, 3, 8, 8)}
    np.testing.assert_allclose(run(found.files[0], feeds)[0], reference(net, feeds)[0], rtol=1e-4, atol=1e-5)
    assert 80 < min(found.proof.outputs.values()) < float("inf")
    exact, model = cleaned(net, fold="exact")
    assert kinds(model) == ["Conv", "BatchNormalization", "Relu", "Add"]
    assert exact.proof.bound == min(exact.proof.outputs.values()) == float("inf")


@pytest.mark.parametrize(("factor", "fold", "left"), [(0.5, "exact", 0), (0.3, "exact", 1), (0.3, "all", 0)])
def test_a_factor_joins_the_conv_behind_it(factor: float, fold: str, left: int, tmp_path: Path) -> None:
    text = f"{HEAD} net (float[1, 3, 8, 8] x) => (float[1, 4, 6, 6] y) {{ f = Mul (x, by)\n y = Conv (f, w, b) }}"
    net = save(
        tmp_path / "n.onnx",
        text,
        {"by": np.asarray(factor, np.float32), "w": drawn(4, 3, 3, 3), "b": drawn(4)},
    )
    found, model = cleaned(net, fold=fold)
    assert kinds(model).count("Mul") == left
    feeds = {"x": drawn(1, 3, 8, 8)}
    np.testing.assert_allclose(run(found.files[0], feeds)[0], reference(net, feeds)[0], rtol=1e-4, atol=1e-5)


# Without groups, which ConvTranspose in onnx's reference evaluator does not support.
@pytest.mark.parametrize("bias", [False, True])
def test_a_vector_joins_the_transposed_conv_before_it(bias: bool, tmp_path: Path) -> None:
    text = f"""{HEAD} net (float[1, 4, 5, 5] x) => (float[1, 6, 10, 10] y) {{
      c = ConvTranspose <strides = [2, 2]> (x, w{", b" if bias else ""})
      y = Add (c, v) }}"""
    held = {
        "w": drawn(4, 6, 2, 2),
        "v": drawn(1, 6, 1, 1, seed=1),
        **({"b": drawn(6, seed=2)} if bias else {}),
    }
    net = save(tmp_path / "net.onnx", text, held)
    found, model = cleaned(net, fold="all")
    assert kinds(model) == ["ConvTranspose"]
    feeds = {"x": drawn(1, 4, 5, 5)}
    np.testing.assert_allclose(run(found.files[0], feeds)[0], reference(net, feeds)[0], rtol=1e-5, atol=1e-5)


def test_branches_and_bodies_are_cleaned_too(tmp_path: Path) -> None:
    def branch(name: str, kind: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Add", ["two", "three"], [f"{name}_five"]),
            helper.make_node("Identity", ["x"], [f"{name}_same"]),
            helper.make_node(kind, [f"{name}_same", f"{name}_five"], [name]),
        ]
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4])]
        )

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["y"], then_branch=branch("up", "Add"), else_branch=branch("down", "Mul")
        ),
    ]
    held = [
        numpy_helper.from_array(np.asarray(v, np.float32), n)
        for n, v in (("zero", 0), ("two", 2), ("three", 3))
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], held)
    net = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), net)
    found, model = cleaned(net, fold="exact")
    inner = [kinds_of(a.g) for node in model.graph.node for a in node.attribute if a.HasField("g")]
    assert sorted(inner) == [["Add"], ["Mul"]]
    for sign in (1, -1):
        feeds = {"x": np.full(4, sign, np.float32)}
        assert np.array_equal(run(found.files[0], feeds)[0], reference(net, feeds)[0])


def kinds_of(graph: onnx.GraphProto) -> list[str]:
    return [node.op_type for node in graph.node]


def test_a_loop_keeps_its_function(tmp_path: Path) -> None:
    text = f"""{HEAD} net (float[3] x) => (float[3] y) {{
      times = Constant <value = int64 {{4}}> ()
      go = Constant <value = bool {{1}}> ()
      y = Loop (times, go, x) <body = step (int64 i, bool c, float[3] s) => (bool d, float[3] t) {{
        d = Identity (c)
        u = Add (s, s)
        t = Sin (u)
      }}>
    }}"""
    net = save(tmp_path / "net.onnx", text)
    found, model = cleaned(net, fold="all")
    feeds = {"x": drawn(3)}
    np.testing.assert_allclose(run(found.files[0], feeds)[0], reference(net, feeds)[0], rtol=1e-5)
    assert kinds(model) == ["Loop"]


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
    net (float[2, 3] x) => (float[2, 3] y) { y = own.twice (x) }
    <domain: "own", opset_import: ["" : 17]> twice (a) => (b) { b = Add (a, a) }"""
    net = save(tmp_path / "net.onnx", text)
    found, model = cleaned(net, fold="exact")
    assert kinds(model) == ["Add"]
    assert not model.functions
    assert [one.domain for one in model.opset_import] == [""]
    feeds = {"x": drawn(2, 3)}
    assert np.array_equal(run(found.files[0], feeds)[0], reference(net, feeds)[0])


@pytest.mark.parametrize("opset", [9, 11, 15, 18, 21])
def test_files_of_all_opsets_are_folded(opset: int, tmp_path: Path) -> None:
    text = f"""<ir_version: 4, opset_import: ["" : {opset}]> net (float[2, 3] x) => (float[2, 3] y) {{
      one = Constant <value = float {{1.0}}> ()
      two = Add (one, one)
      y = Mul (x, two)
    }}"""
    found, model = cleaned(save(tmp_path / "net.onnx", text), fold="exact")
    assert kinds(model) == ["Mul"]
    assert {one.domain: one.version for one in model.opset_import} == {"": opset}
    assert run(found.files[0], {"x": np.ones((2, 3), np.float32)})[0].tolist() == [[2.0] * 3] * 2


def test_pairs_of_a_quantized_file_stay(tmp_path: Path) -> None:
    text = f"""{HEAD} net (float[1, 3, 8, 8] x) => (float[1, 4, 6, 6] y) {{
      q = QuantizeLinear (x, s, z)
      d = DequantizeLinear (q, s, z)
      v = DequantizeLinear <axis = 0> (w, t, o)
      same = Identity (d)
      c = Conv (same, v)
      p = QuantizeLinear (c, s, z)
      y = DequantizeLinear (p, s, z)
    }}"""
    weights = {"s": np.float32(0.05), "z": np.uint8(128), "t": np.full(4, 0.01, np.float32), "o": np.zeros(4, np.int8),
               "w": np.random.default_rng(0).integers(-127, 128, (4, 3, 3, 3)).astype(np.int8)}  # fmt: skip
    net = save(tmp_path / "net.onnx", text, {name: np.asarray(value) for name, value in weights.items()})
    _, model = cleaned(net, fold="all")
    pair = ["QuantizeLinear", "DequantizeLinear"]
    assert sorted(kinds(model)) == sorted([*pair, "DequantizeLinear", "Conv", *pair])
