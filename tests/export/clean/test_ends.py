"""Tests of cleaning a file's form: float16 to float32, layout, opset, initializers per reader, and names."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from clean_nets import cleaned, drawn, kinds, reference, run, save, sizes
from onnx import TensorProto

from qatkit.export.clean.layout import change_layout
from qatkit_verify.errors import ConfigError

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'


def test_float16_becomes_float32_at_every_place(tmp_path: Path) -> None:
    text = f"""{HEAD} net (float16[batch, 6] x) => (float16[batch, 5] y, float[batch, 5] z) {{
      m = MatMul (x, w)
      s = Mul (m, half)
      z = Cast <to = 1> (s)
      t = Tanh (z)
      u = Cast <to = 10> (t)
      y = Relu (u)
    }}"""
    net = save(
        tmp_path / "net.onnx",
        text,
        {"w": drawn(6, 5).astype(np.float16), "half": np.float16(0.5) * np.ones(1, np.float16)},
    )
    found, model = cleaned(net, float32=True)
    ends = [*model.graph.input, *model.graph.output]
    assert {one.type.tensor_type.elem_type for one in ends} == {TensorProto.FLOAT}
    assert TensorProto.FLOAT16 not in {one.data_type for one in model.graph.initializer}
    assert kinds(model).count("Cast") == 1  # it computes an output
    x = drawn(3, 6).astype(np.float16)
    for ours, exact in zip(
        run(found.files[0], {"x": x.astype(np.float32)}), reference(net, {"x": x}), strict=True
    ):
        np.testing.assert_allclose(ours, exact.astype(np.float32), atol=4e-3)
    assert found.proof.bound == 30


def test_channels_go_last_at_both_ends(tmp_path: Path) -> None:
    text = f"{HEAD} net (float[n, 3, 8, 9] x) => (float[n, 4, 6, 7] y) {{ y = Conv (x, w) }}"
    net = save(tmp_path / "net.onnx", text, {"w": drawn(4, 3, 3, 3)})
    found, model = cleaned(net, layout={"x": "nhwc", "y": "nhwc"})
    assert sizes(model.graph.input[0]) == ["n", 8, 9, 3]
    assert sizes(model.graph.output[0]) == ["n", 6, 7, 4]
    assert kinds(model) == ["Transpose", "Conv", "Transpose"]
    x = drawn(2, 3, 8, 9)
    (ours,) = run(found.files[0], {"x": np.moveaxis(x, 1, -1).copy()})
    np.testing.assert_allclose(np.moveaxis(ours, -1, 1), reference(net, {"x": x})[0], rtol=1e-4, atol=1e-5)


def test_a_transpose_at_an_end_is_joined(tmp_path: Path) -> None:
    text = f"""{HEAD} net (float[1, 8, 9, 3] x) => (float[1, 6, 7, 4] y) {{
      first = Transpose <perm = [0, 3, 1, 2]> (x)
      c = Conv (first, w)
      y = Transpose <perm = [0, 2, 3, 1]> (c)
    }}"""
    net = save(tmp_path / "net.onnx", text, {"w": drawn(4, 3, 3, 3)})
    found, model = cleaned(net, layout={"x": "nchw", "y": "nchw"})
    assert kinds(model) == ["Conv"]
    assert [one.name for one in (*model.graph.input, *model.graph.output)] == ["x", "y"]
    x = drawn(1, 8, 9, 3)
    (ours,) = run(found.files[0], {"x": np.moveaxis(x, -1, 1).copy()})
    np.testing.assert_allclose(np.moveaxis(ours, 1, -1), reference(net, {"x": x})[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"z": "nhwc"}, "clean.layout=z: expected an input or output of the file"),
        ({"x": "hwc"}, "clean.layout.x=hwc: expected one of nchw, nhwc"),
        (
            {"y": "nhwc"},
            "clean.layout.y=nhwc: the file gives 'y' no shape of 3 axes or more; leave it out of",
        ),
    ],
)
def test_a_wrong_layout_is_one_sentence(layout: dict[str, str], message: str, tmp_path: Path) -> None:
    text = f"{HEAD} net (float[1, 3, 8] x) => (float[1, 24] y) {{ y = Flatten (x) }}"
    with pytest.raises(ConfigError, match=message):
        cleaned(save(tmp_path / "net.onnx", text), layout=layout)


def test_the_layout_of_a_constant_output_is_refused() -> None:
    zeros = ir.tensor(np.zeros((1, 3, 8), np.float32), name="y")
    y = ir.Value(name="y", shape=ir.Shape([1, 3, 8]), type=ir.TensorType(zeros.dtype), const_value=zeros)
    graph = ir.Graph([], [y], nodes=[], initializers=[y], opset_imports={"": 18}, name="net")
    with pytest.raises(
        ConfigError, match=r"clean\.layout\.y=nhwc: no node of the file computes the output 'y'; "
    ):
        change_layout(ir.Model(graph, ir_version=8), {"y": "nhwc"})


BODY = """net (float[2, 3, 8] x) => (float[2, 3] y, float[2, 3, 1] z) {
  r = Relu (x)
  c = Clip (r, low, high)
  m = ReduceSum <keepdims = 0> (c, axis)
  z = Unsqueeze (m, axis)
  s = Squeeze (z, axis)
  y = Softmax (s)
}"""


@pytest.mark.parametrize(("before", "after"), [(13, 17), (13, 21), (17, 13), (17, 14), (21, 19)])
def test_the_opset_goes_up_and_down(before: int, after: int, tmp_path: Path) -> None:
    held = {"low": np.float32(0.1), "high": np.float32(0.9), "axis": np.array([2], np.int64)}
    text = f'<ir_version: 7, opset_import: ["" : {before}]> {BODY}'
    net = save(tmp_path / "net.onnx", text, {name: np.asarray(value) for name, value in held.items()})
    found, model = cleaned(net, opset=after)
    assert {one.domain: one.version for one in model.opset_import} == {"": after}
    feeds = {"x": drawn(2, 3, 8)}
    for ours, exact in zip(run(found.files[0], feeds), reference(net, feeds), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-6)


def test_an_operator_without_a_form_below_is_named(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]>
    net (float[1, 2, 4, 4] x, float[1, 4, 4, 2] g) => (float[1, 2, 4, 4] y) { y = GridSample (x, g) }"""
    net = save(tmp_path / "net.onnx", text)
    with pytest.raises(ConfigError, match=r"clean.opset=13: .*GridSample"):
        cleaned(net, opset=13)


def test_a_shared_initializer_gets_a_copy_for_each_reader(tmp_path: Path) -> None:
    text = f"{HEAD} net (float[2, 4] x) => (float[2, 4] y) {{ a = MatMul (x, w)\n b = MatMul (a, w)\n y = Add (b, x) }}"
    net = save(tmp_path / "net.onnx", text, {"w": drawn(4, 4)})
    found, model = cleaned(net, unshare=True)
    assert len({node.input[1] for node in model.graph.node[:2]}) == 2
    assert len(model.graph.initializer) == 2
    assert found.proof.outputs == {"y": float("inf")}


@pytest.mark.parametrize(("names", "ends"), [("safe", ["x:0", "y 1"]), ("all", ["x_0", "y_1"])])
def test_names_are_plain_and_unique(names: str, ends: list[str], tmp_path: Path) -> None:
    nodes = [
        onnx.helper.make_node("Relu", ["x:0"], ["a:b"], name="top_"),
        onnx.helper.make_node("Neg", ["a:b"], ["a_b"], name="top:"),
        onnx.helper.make_node("Add", ["a:b", "a_b"], ["y 1"]),
    ]
    info = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("x:0", "y 1")]
    graph = onnx.helper.make_graph(nodes, "g", info[:1], info[1:])
    net = tmp_path / "net.onnx"
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8), net
    )
    _, model = cleaned(net, names=names)
    assert [one.name for one in (*model.graph.input, *model.graph.output)] == ends
    inner = [name for node in model.graph.node for name in (node.name, *node.output) if name not in ends]
    assert all(re.fullmatch(r"[A-Za-z0-9_./]+", name) for name in inner)
    assert len({node.name for node in model.graph.node}) == 3
    assert len({name for node in model.graph.node for name in node.output}) == 3
