"""Tests of operators that a mode leaves float: the report names them, and they keep their weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import float_files
import numpy as np
import onnx
import pytest
from float_files import by_hand, made, settings
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from qatkit.config.schema import DataConfig
from qatkit.export import ort_modes
from qatkit.jobs import quantize_file
from qatkit.quant.backends import FBGEMM

IMAGES = float_files.digits()[0][:64]


def branch(name: str, nodes: list[NodeProto]) -> onnx.GraphProto:
    result = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, name, [], [result])


def bright(inputs: str) -> list[NodeProto]:
    """Returns nodes that check whether the largest value is non-zero, which is known only at run time."""
    return [
        helper.make_node("ReduceMax", [inputs], ["most"], "most", keepdims=0),
        helper.make_node("Cast", ["most"], ["yes"], "yes", to=TensorProto.BOOL),
    ]


def stored(path: Path) -> dict[str, NDArray[Any]]:
    return {one.name: numpy_helper.to_array(one) for one in onnx.load(str(path)).graph.initializer}


def recurrent_branches(path: Path, kind: str) -> Path:
    """Writes a graph that runs one of two recurrent operators on an input [n, 8, 4], and then a MatMul."""
    rows = {"LSTM": 32, "GRU": 24, "RNN": 8}[kind]
    layers = {
        name: [
            helper.make_node(kind, ["steps", f"{name}_w", f"{name}_r"], ["", f"{name}_last"], f"/{name}/{kind}",
                             hidden_size=8),
            helper.make_node("Squeeze", [f"{name}_last", "first"], [name], f"/{name}/Squeeze"),
        ]
        for name in ("loud", "quiet")
    }  # fmt: skip
    nodes = [
        helper.make_node("Transpose", ["x"], ["steps"], "/Transpose", perm=[1, 0, 2]),
        *bright("x"),
        helper.make_node("If", ["yes"], ["h"], "/If", then_branch=branch("loud", layers["loud"]),
                         else_branch=branch("quiet", layers["quiet"])),
        helper.make_node("MatMul", ["h", "fc"], ["out"], "/MatMul"),
    ]  # fmt: skip
    draw = np.random.default_rng(0)
    weights: dict[str, Any] = {"first": np.array([0], np.int64), "fc": draw.normal(size=(8, 16))}
    for name in layers:
        weights |= {f"{name}_w": draw.normal(size=(1, rows, 4)), f"{name}_r": draw.normal(size=(1, rows, 8))}
    held = [
        numpy_helper.from_array(value if value.dtype == np.int64 else value.astype(np.float32), name)
        for name, value in weights.items()
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 4])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 16])],
        held,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


@pytest.mark.parametrize("mode", ["dynamic", "weight_only", "static", "float16"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_weights_in_branches_are_named(kind: str, mode: str, tmp_path: Path) -> None:
    source = recurrent_branches(tmp_path / "float.onnx", kind)
    (tmp_path / "data").mkdir()
    np.savez(
        tmp_path / "data" / "all.npz", x=np.random.default_rng(1).normal(size=(48, 8, 4)).astype(np.float32)
    )
    data = DataConfig("qatkit.data.arrays.arrays", str(tmp_path / "data"), workers=0, eval_batch_size=8)
    config = settings(source, mode, tmp_path / "run", data=data)
    config.calibration.images, config.calibration.batch_size = 16, 4
    assert quantize_file.quantize(config) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    graph = onnx.load(str(tmp_path / "run" / made(mode))).graph
    held = {one.name: one.data_type for one in graph.initializer}
    left = TensorProto.FLOAT in {kind for name, kind in held.items() if name.endswith(("_w", "_r"))}
    told = json.dumps([report["notes"], report["skipped"]])
    for name in ("loud", "quiet"):
        assert (f"/{name}/{kind}" in told) == left
    assert left or mode == "float16"


def spoiled(tool: Callable[..., None], weight: str, node: str) -> Callable[..., None]:
    """Returns ONNX Runtime's tool with a defect: it halves a weight's integers unless `node` is excluded."""

    def run(source: onnx.ModelProto, path: Path, **given: Any) -> None:
        tool(source, path, **given)
        if node in given["nodes_to_exclude"]:
            return
        model = onnx.load(str(path))
        for one in model.graph.initializer:
            if one.name == f"{weight}_quantized":
                wrong = numpy_helper.to_array(one) // 2
                one.CopyFrom(numpy_helper.from_array(wrong, one.name))
        onnx.save(model, str(path))

    return run


@pytest.mark.parametrize(("weight", "node", "other"), [("w", "conv", "fc"), ("fc", "fc", "w")])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_an_operator_with_wrong_weights_stays_float(
    mode: str, weight: str, node: str, other: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = f"quantize_{mode}"
    monkeypatch.setattr(ort_modes, tool, spoiled(getattr(ort_modes, tool), weight, node))
    source = by_hand(tmp_path / "float.onnx")
    config = settings(source, mode, tmp_path / "run")
    config.verify.max_drop = None
    config.backend.reduce_range = True  # with `auto`, the integers of a matrix are written again
    assert quantize_file.by_tools(config) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["notes"] == [
        f"{mode}: 1 operator stays float because the converted weights would be wrong: {node}"
    ]
    target = tmp_path / "run" / made(mode)
    before, after = stored(source), stored(target)
    assert any(np.array_equal(after[weight], one) for one in (before[weight], before[weight].T))
    assert after[f"{other}_quantized"].dtype == np.int8
    exact, found = float_files.logits(source, IMAGES), float_files.logits(target, IMAGES)
    assert np.abs(found - exact).max() < 0.05 * np.ptp(exact)


@pytest.mark.parametrize("mode", ["dynamic", "static", "weight_only"])
def test_what_branches_read_stays_as_it_was(mode: str, tmp_path: Path) -> None:
    """Checks a square weight that the dynamic tool transposes in place and whose first row a branch reads."""
    row = [
        helper.make_node("Gather", ["fc", "zero"], ["row"], "row"),
        helper.make_node("Mul", ["row", "ten"], ["much"], "much"),
    ]
    nodes = [
        *bright("input"),
        helper.make_node("Conv", ["input", "w", "b"], ["y"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["y"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc"], ["z"], "fc", transB=1),
        helper.make_node("If", ["yes"], ["more"], "if", then_branch=branch("much", row),
                         else_branch=branch("none", [helper.make_node("Identity", ["b"], ["none"], "none")])),
        helper.make_node("Add", ["z", "more"], ["output"], "add"),
    ]  # fmt: skip
    draw = np.random.default_rng(0)
    weights = {
        "w": draw.normal(size=(16, 3, 3, 3)),
        "b": draw.normal(size=16),
        "fc": draw.normal(size=(16, 16)),
    }
    source = by_hand(
        tmp_path / "float.onnx", nodes=nodes, classes=16, weights=weights | {"ten": np.array(10.0)}
    )
    model, target = onnx.load(str(source)), tmp_path / "made.onnx"
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "zero"))
    onnx.save(model, str(source))
    if mode == "static":
        ort_modes.static(source, target, np.split(IMAGES, 4), FBGEMM)
    else:
        getattr(ort_modes, mode)(source, target)
    exact, found = float_files.logits(source, IMAGES), float_files.logits(target, IMAGES)
    assert np.abs(found - exact).max() < 0.05 * np.ptp(exact)
