"""Tests of the ONNX reader that does without the onnx package, against onnx itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qatkit.graph.operators import onnx_operators, operator
from qatkit.verify.graph_view import conv_ops
from qatkit_verify.errors import ConfigError
from qatkit_verify.kernels import CONVS, MATMULS, executed
from qatkit_verify.onnx_file import read_onnx
from qatkit_verify.saturation import _PAIR


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Returns a file with a Conv, a Gemm with transA, attributes, metadata and two opsets."""
    draw = np.random.default_rng(0)
    weights = {
        "w": draw.standard_normal((16, 3, 3, 3)),
        "v": draw.standard_normal((5, 4)),
        "s": np.float32(2),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"], "convolution", group=1, pads=[1, 1, 1, 1]),
        helper.make_node("Gemm", ["a", "v"], ["b"], "product", transA=1, transB=0, alpha=0.5),
        helper.make_node("Mul", ["b", "s"], ["c"]),
    ]
    ports = [("x", [1, 3, 8, 8]), ("a", [5, 2])], [("y", [1, 16, 8, 8]), ("c", [2, 4])]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in some]
        for some in ports
    )
    stored = [numpy_helper.from_array(np.asarray(one, np.float32), name) for name, one in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    helper.set_model_props(model, {"a key": "a välue", "empty": ""})
    onnx.save(model, str(tmp_path / "model.onnx"))
    return tmp_path / "model.onnx"


def test_versions_nodes_and_shapes_are_those_that_onnx_reads(file: Path) -> None:
    model, found = onnx.load(str(file)), read_onnx(file)

    assert (found.ir_version, dict(found.opsets)) == (8, {"": 13, "com.microsoft": 1})
    assert dict(found.shapes) == {one.name: tuple(one.dims) for one in model.graph.initializer}
    assert dict(found.types) == {one.name: one.data_type for one in model.graph.initializer}
    assert [(n.op_type, n.name, n.inputs, n.outputs) for n in found.nodes] == [
        (n.op_type, n.name, tuple(n.input), tuple(n.output)) for n in model.graph.node
    ]
    assert found.nodes[1].ints == {"transA": 1, "transB": 0} and found.nodes[0].ints == {"group": 1}


def test_kernels_are_counted_as_by_hand(file: Path) -> None:
    macs = {one.op.removeprefix("Fused"): one.macs for one in executed(file) if one.macs}

    assert macs["Conv"] == 8 * 8 * 16 * 3 * 3 * 3
    assert macs["Gemm"] == 2 * 4 * 5


def test_the_operators_that_multiply_are_those_of_the_one_table() -> None:
    assert conv_ops() == CONVS and onnx_operators([operator("linear")], kernels=True) == MATMULS


def test_the_file_that_asks_a_processor_is_a_valid_one() -> None:
    model = onnx.load_from_string(_PAIR)
    onnx.checker.check_model(model)

    assert [node.op_type for node in model.graph.node] == ["MatMulInteger"]
    np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), [[127], [127]])


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 40, b"\x3a\xff\x01abc", b"hello, this is text"])
def test_what_is_no_onnx_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"onnx file=.*broken\.onnx: the file can't be read as ONNX"):
        read_onnx(path)


def test_every_cut_of_a_file_is_refused_or_read(file: Path, tmp_path: Path) -> None:
    whole, path = file.read_bytes(), tmp_path / "cut.onnx"
    for length in range(1, len(whole), 37):
        path.write_bytes(whole[:length])
        try:
            assert read_onnx(path).opsets
        except ConfigError:
            continue
