"""Tests of quantized copies of ONNX files: names, metadata, branches, functions, layers and refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx_models import FLOAT, FLOAT16, INT64, save
from small_nets import Case, Net, begin_again, between, floats, fused_conv, gemms, groups, residual, saved
from written import difference, for_sizes, same, write

from qatkit.config.schema import OverrideConfig
from qatkit.importing import import_onnx
from qatkit.importing.write_back import write_back
from qatkit_verify.errors import ConfigError

GROUPS, RESIDUAL = Case(groups, {}), Case(residual, {})
GEMMS = Case(gemms, {}, {"x": (4, 8)})


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """Makes each test draw the same numbers, whatever ran before."""
    begin_again()


def test_branch_without_weights_may_read_a_pair(tmp_path: Path) -> None:
    """The If is like the one that TorchScript writes for `x.squeeze(3)`."""
    net = Net()
    pooled = net.add("ReduceMean", net.add("Relu", net.conv("x", 16, 3)), axes=[3])
    wide = net.add("Equal", net.add("Gather", net.add("Shape", pooled), net.constant(3)), net.constant(1))
    branches = {}
    for name, operator in (("then_branch", "Squeeze"), ("else_branch", "Identity")):
        inputs = [pooled, "axes"] if operator == "Squeeze" else [pooled]
        node = helper.make_node(operator, inputs, [f"{name}_out"], f"{name}/{operator}")
        branches[name] = helper.make_graph(
            [node], name, [], [helper.make_empty_tensor_value_info(f"{name}_out")]
        )
    net.constants["axes"] = np.array([3])
    chosen = net.add("If", wide, name="choice", **branches)
    y = net.add("Conv", chosen, net.constant(floats(8, 16, 3)), name="last")
    source = save(tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, [y], net.constants)
    model = onnx.load(str(source))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(y, FLOAT, ["n", 8, 6]))
    onnx.save(model, str(source))
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds)
    same(written, feeds)
    assert [node.op_type for node in onnx.load(str(written.path)).graph.node].count("If") == 1


def test_branch_that_the_input_chooses_is_refused(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", FLOAT, (4, 3, 1, 1), floats(12))
    branches = {
        name: helper.make_graph(
            [helper.make_node("Conv", ["x", "w"], [name], f"{name}/Conv")],
            name, [], [helper.make_empty_tensor_value_info(name)], [weight],
        )
        for name in ("then_branch", "else_branch")
    }  # fmt: skip
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "three"], ["height"]),
        helper.make_node("Greater", ["height", "eight"], ["is_large"]),
        helper.make_node("If", ["is_large"], ["chosen"], "choice", **branches),
        helper.make_node("Conv", ["chosen", "v"], ["y"], "last/Conv"),
    ]
    constants = {"three": np.array(3), "eight": np.array(8), "v": floats(2, 4, 1, 1)}
    source = save(tmp_path / "float.onnx", nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, ["y"], constants)
    where = "node 'else_branch/Conv' is in a branch of 'choice', whose condition is computed"
    with pytest.raises(
        ConfigError, match=f"{where}, so it cannot be quantized there; keep it in float with "
    ):
        write(source, {"x": torch.randn(2, 3, 8, 8)})
    assert not (tmp_path / "float_int8.onnx").exists()
    kept = {"else_branch/Conv": OverrideConfig(float=True)}
    assert write(source, {"x": torch.randn(2, 3, 8, 8)}, overrides=kept).path.exists()


def test_any_height_and_width(tmp_path: Path) -> None:
    net = Net()
    a = net.add("Relu", net.conv("x", 16, 3, strides=[2, 2]))
    size = net.add("Slice", net.add("Shape", a), *(net.constant(np.array([i])) for i in (2, 4)))
    b = net.conv(net.add("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]), 16, 16)
    target = net.add("Concat", net.constant(np.array([1, 16])), size, axis=0)
    up = net.add(
        "Resize", b, "", "", target, coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    y = net.conv(net.add("Concat", a, up, axis=1), 4, 32)
    inputs = {"x": (FLOAT, [1, 3, "height", "width"])}
    source = save(tmp_path / "float.onnx", net.nodes, inputs, [y], net.constants)
    written = write(source, {"x": torch.randn(1, 3, 32, 32)})
    sizes = onnx.load(str(written.path)).graph.input[0].type.tensor_type.shape.dim[2:]
    assert [one.dim_param for one in sizes] == ["height", "width"]
    for height, width in ((32, 32), (48, 64), (16, 80)):
        feeds = {"x": torch.randn(1, 3, height, width)}
        same(written, feeds, converted=for_sizes(written, feeds))
    assert written.optimized()["QLinearConv"] == 3


def test_names_of_a_quantizer_stay_with_their_owners(tmp_path: Path) -> None:
    net = Net()
    a = net.add("Conv", "x", net.constant(floats(16, 3, 3, 3)), name="x_QuantizeLinear")
    net.nodes[-1].output[0] = "x_QuantizeLinear_Output"
    net.constants["x_scale"] = floats(16, 16, 3, 3)
    a = net.add("Conv", "x_QuantizeLinear_Output", "x_scale", name="x_DequantizeLinear")
    inputs = {"x": (FLOAT, ["n", 3, 16, 16])}
    source = save(tmp_path / "float.onnx", net.nodes, inputs, [a], net.constants)
    feeds = {"x": torch.randn(2, 3, 16, 16)}
    written = write(source, feeds)
    same(written, feeds)
    found = difference(source, written.path)
    assert (found.gone, found.new, found.changed) == (set(), Counter(), set())


def test_metadata_and_doc_strings_stay(tmp_path: Path) -> None:
    source, feeds = saved(GROUPS, tmp_path, doc_string="of the model", producer_name="someone")
    model = onnx.load(str(source))
    model.metadata_props.add(key="classes", value="cat,dog")
    model.graph.node[0].doc_string, model.graph.doc_string, model.model_version = (
        "of a node",
        "of the graph",
        7,
    )
    onnx.save(model, str(source))
    written = write(source, feeds)
    difference(source, written.path)
    assert [(p.key, p.value) for p in onnx.load(str(written.path)).metadata_props] == [("classes", "cat,dog")]


def test_opset_is_raised_only_where_pairs_need_it(tmp_path: Path) -> None:
    source, feeds = saved(GROUPS, tmp_path)
    for opset, wanted in ((11, 13), (13, 13), (15, 15)):
        model = onnx.load(str(source))
        model.opset_import[0].version = opset
        onnx.save(model, str(source))
        written = onnx.load(str(write(source, feeds).path))
        assert [one.version for one in written.opset_import if not one.domain] == [wanted]


def test_functions_of_the_file_are_inlined(tmp_path: Path) -> None:
    body = [helper.make_node("Relu", ["a"], ["b"], "inner")]
    local = helper.make_function("local", "Act", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    net = Net()
    a = net.conv("x", 16, 3)
    net.nodes.append(helper.make_node("Act", [a], ["activated"], "act", domain="local"))
    y = net.conv("activated", 8, 16)
    source = save(
        tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, [y], net.constants,
        functions=[local], imports=[helper.make_opsetid("local", 1)],
    )  # fmt: skip
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds)
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 2


def test_lstm_has_int8_weights(tmp_path: Path) -> None:
    net = Net()
    states = [net.constant(floats(1, 4 * 16, size)) for size in (8, 16)]
    steps = net.add("LSTM", "x", *states, net.constant(floats(1, 128)), hidden_size=16, outputs=3)
    rows = net.add("Squeeze", steps, net.constant(np.array([1])))
    y = net.add("MatMul", rows, net.constant(floats(16, 4)))
    inputs = {"x": (FLOAT, [5, "n", 8])}
    source = save(tmp_path / "float.onnx", net.nodes, inputs, [y, f"{steps}1"], net.constants)
    feeds = {"x": torch.randn(5, 2, 8)}
    written = write(source, feeds)
    same(written, feeds)
    assert difference(source, written.path).new == {"Cast": 2, "Mul": 2}
    whole = [
        one
        for one in onnx.load(str(written.path)).graph.initializer
        if one.data_type == onnx.TensorProto.INT8
    ]
    assert sorted(tuple(one.dims) for one in whole if len(one.dims) > 2) == [(1, 64, 8), (1, 64, 16)]


def test_embedding_looks_bytes_up(tmp_path: Path) -> None:
    net = Net()
    rows = net.add("Gather", net.constant(floats(20, 16)), "ids")
    y = net.add("MatMul", net.add("ReduceMean", rows, axes=[1], keepdims=0), net.constant(floats(16, 4)))
    source = save(tmp_path / "float.onnx", net.nodes, {"ids": (INT64, ["n", 6])}, [y, rows], net.constants)
    feeds = {"ids": torch.randint(0, 20, (3, 6))}
    written = write(source, feeds)
    same(written, feeds)
    assert difference(source, written.path).new == {"Gather": 1, "Cast": 1, "Mul": 1}


@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_a_weight_that_a_cast_makes_keeps_its_type(kind: str, tmp_path: Path) -> None:
    net, to = Net(), helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    weight = net.add("Cast", net.constant(floats(16, 4)), to=to)
    y = net.add("Cast", net.add("MatMul", net.add("Cast", "x", to=to), weight), to=FLOAT)
    source = save(tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 16])}, [y], net.constants)
    with pytest.raises(ConfigError, match=f"computes in {kind} instead of float32"):
        write(source, {"x": torch.randn(3, 16)})


def test_quantized_output_behind_an_identity(tmp_path: Path) -> None:
    net = Net()
    a = net.conv("x", 16, 3)
    b = net.add("Identity", a)
    c = net.conv(b, 8, 16)
    source = save(
        tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, [b, c, a], net.constants
    )
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds)
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 2


def test_taken_branch_takes_the_place_of_its_if(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", FLOAT, (4, 3, 1, 1), floats(12))
    then = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["inner"], "inner/Conv")], "then", [],
        [helper.make_empty_tensor_value_info("inner")], [weight],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["negative"])],
        "else",
        [],
        [helper.make_empty_tensor_value_info("negative")],
    )
    nodes = [
        helper.make_node("Equal", ["rate", "wanted"], ["is_wanted"]),
        helper.make_node("If", ["is_wanted"], ["y"], "choice", then_branch=then, else_branch=other),
    ]
    inputs = {"x": (FLOAT, ["n", 3, 8, 8]), "rate": (INT64, [])}
    source = save(tmp_path / "float.onnx", nodes, inputs, ["y"], {"wanted": np.array(16000)})
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds, fixed={"rate": 16000})
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 1
    assert [one.name for one in onnx.load(str(written.path)).graph.input] == ["x"]


def test_trained_floats_are_written(tmp_path: Path) -> None:
    net = Net()
    slope = net.constant(between(0.1, 0.3, 16, 1, 1))
    y = net.conv(net.add("PRelu", net.conv("x", 16, 3), slope), 8, 16)
    source = save(tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, [y], net.constants)
    feeds = {"x": torch.randn(2, 3, 8, 8)}
    written = write(source, feeds)
    with torch.no_grad():
        written.converted.get_submodule("/PRelu_1").weight.mul_(1.5)  # type: ignore[operator]
    write_back(written.model, written.converted, written.path)
    same(written, feeds)


def test_layers_that_run_backwards(tmp_path: Path) -> None:
    net = Net()
    states = [net.constant(floats(2, 3 * 16, size)) for size in (8, 16)]
    bias = net.constant(floats(2, 96))
    steps = net.add(
        "GRU", "x", *states, bias, hidden_size=16, outputs=2, direction="bidirectional", linear_before_reset=1
    )
    shape = net.constant(np.array([0, 0, -1]))
    rows = net.add("Reshape", net.add("Transpose", steps, perm=[0, 2, 1, 3]), shape)
    y = net.add("MatMul", rows, net.constant(floats(32, 4)))
    source = save(tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, [5, "n", 8])}, [y, steps], net.constants)
    feeds = {"x": torch.randn(5, 2, 8)}
    same(write(source, feeds), feeds, steps=1)


def test_nodes_without_names(tmp_path: Path) -> None:
    source, feeds = saved(RESIDUAL, tmp_path)
    model = onnx.load(str(source))
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, str(source))
    written = write(source, feeds)
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 3


def test_weights_beside_the_file(tmp_path: Path) -> None:
    source, feeds = saved(GROUPS, tmp_path)
    onnx.save(
        onnx.load(str(source)), str(source), save_as_external_data=True, location="w.bin", size_threshold=0
    )
    same(write(source, feeds), feeds)


def test_weights_in_float16_are_refused(tmp_path: Path) -> None:
    net = Net()
    y = net.conv("x", 16, 3)
    halves = {name: value.astype(np.float16) for name, value in net.constants.items()}
    source = save(tmp_path / "float.onnx", net.nodes, {"x": (FLOAT16, ["n", 3, 8, 8])}, [y], halves)
    with pytest.raises(ConfigError, match="node '/Conv_0' computes in float16 instead of float32"):
        write(source, {"x": torch.randn(2, 3, 8, 8)})


def test_graph_of_another_file_is_refused(tmp_path: Path) -> None:
    source, feeds = saved(GROUPS, tmp_path)
    written = write(source, feeds)
    (tmp_path / "other").mkdir()
    other, _ = saved(GEMMS, tmp_path / "other")
    with pytest.raises(ConfigError, match="of the converted graph belongs to no node of the file"):
        write_back(import_onnx(other), written.converted, tmp_path / "y.onnx")
    assert not (tmp_path / "y.onnx").exists()


def test_activation_in_the_node_of_its_convolution(tmp_path: Path) -> None:
    imports = [helper.make_opsetid("com.microsoft", 1)]
    source, feeds = saved(Case(fused_conv, {}), tmp_path, imports=imports)
    model = onnx.load(str(source))
    name = model.graph.output[0].name
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info(name, FLOAT, ["n", 8, 16, 16]))
    onnx.save(model, str(source))
    same(write(source, feeds), feeds)


def test_new_names_of_long_names_are_short(tmp_path: Path) -> None:
    """TensorFlow's converters join node names, so that a name may take hundreds of characters."""
    net = Net()
    long = ";".join(f"model/part_{i}/Conv2D" for i in range(40))
    y = net.add("Conv", "x", net.constant(floats(8, 3, 3, 3)), name=long)
    y = net.add("Conv", net.add("Relu", y), net.constant(floats(4, 8, 1, 1)), name=f"{long};last")
    source = save(tmp_path / "float.onnx", net.nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, [y], net.constants)
    written = write(source, {"x": torch.randn(2, 3, 8, 8)})
    same(written, {"x": torch.randn(2, 3, 8, 8)})
    given = onnx.load(str(source)).graph
    names = {name for node in given.node for name in (node.name, *node.output)}
    graph = onnx.load(str(written.path)).graph
    new = {name for node in graph.node for name in (node.name, *node.output)} - names
    new |= {one.name for one in graph.initializer} - {one.name for one in given.initializer}
    assert new and max(map(len, new)) < 110
