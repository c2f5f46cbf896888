"""Tests of legal files with infinite constants, unsorted nodes, or names that quantizers use themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import float_files
import numpy as np
import onnx
import pytest
from float_files import by_hand, made, settings
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from qatkit.importing.read import read
from qatkit.jobs import quantize_file
from qatkit_verify.errors import ConfigError

MODES = ("dynamic", "static", "float16", "weight_only")
HEAD = [
    helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
    helper.make_node("Flatten", ["p"], ["f"], "flatten"),
    helper.make_node("Gemm", ["f", "fc"], ["output"], "fc", transB=1),
]
CONV = helper.make_node("Conv", ["input", "w", "b"], ["y"], "conv", pads=[1] * 4)


def weights(**more: object) -> dict[str, NDArray[np.float64]]:
    draw = np.random.default_rng(0)
    own = {"w": draw.normal(size=(16, 3, 3, 3)), "b": draw.normal(size=16), "fc": draw.normal(size=(10, 16))}
    return own | {name: np.asarray(value, np.float64) for name, value in more.items()}


def reversed_order(path: Path) -> Path:
    model = onnx.load(str(by_hand(path)))
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, str(path))
    return path


def named(names: Mapping[str, str]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        model = onnx.load(str(by_hand(path)))
        for node in model.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        for one in (*model.graph.input, *model.graph.output, *model.graph.initializer):
            one.name = names.get(one.name, one.name)
        onnx.save(model, str(path))
        return path

    return write


def open_clip(path: Path) -> Path:
    nodes = [CONV, helper.make_node("Clip", ["y", "zero", "top"], ["r"], "clip"), *HEAD]
    return by_hand(path, nodes=nodes, weights=weights(zero=0, top=np.inf))


def masked(path: Path) -> Path:
    """Writes a file with a mask: scores of -inf before a Softmax, and only finite values after it."""
    nodes = [CONV, helper.make_node("Add", ["y", "mask"], ["m"], "add"),
             helper.make_node("Softmax", ["m"], ["s"], "softmax"), helper.make_node("Relu", ["s"], ["r"], "relu"),
             *HEAD]  # fmt: skip
    return by_hand(path, nodes=nodes, weights=weights(mask=np.where(np.arange(8) % 3 == 0, -np.inf, 0)))


def infinite_bias(path: Path) -> Path:
    """Writes a file with a mask of -inf that ONNX Runtime turns into the bias of a Gemm."""
    nodes = [CONV, helper.make_node("Relu", ["y"], ["r"], "relu"), *HEAD[:2],
             helper.make_node("MatMul", ["f", "m"], ["g"], "product"),
             helper.make_node("Add", ["g", "mask"], ["a"], "add"),
             helper.make_node("Softmax", ["a"], ["output"], "softmax")]  # fmt: skip
    more = {
        "m": np.random.default_rng(1).normal(size=(16, 10)),
        "mask": np.where(np.arange(10) % 3 == 0, -np.inf, 0),
    }
    return by_hand(path, nodes=nodes, weights=weights(**more))


def padded(path: Path) -> Path:
    pads = helper.make_node("Constant", [], ["pads"], "pads", value_ints=[0, 0, 1, 1, 0, 0, 1, 1])
    nodes = [CONV, pads, helper.make_node("Pad", ["y", "pads", "least"], ["q"], "pad"),
             helper.make_node("MaxPool", ["q"], ["r"], "max", kernel_shape=[3, 3], strides=[2, 2]), *HEAD]  # fmt: skip
    return by_hand(path, nodes=nodes, weights=weights(least=-np.inf))


CASES: dict[str, Callable[[Path], Path]] = {
    "any order": reversed_order,
    "ends": named({"input": "x_QuantizeLinear_Output", "output": "y_scale", "r": "y_scale_QuantizeLinear_Output"}),
    "ends made by the tool": named({"output": "f_quantized", "input": "r_DequantizeLinear_Output"}),
    "output as of the input": named({"output": "input_QuantizeLinear_Output"}),
    "within": named({"y": "input_QuantizeLinear_Output", "r": "input_quantized", "p": "input_DequantizeLinear_Output"}),
    "weights": named({"w": "input_scale", "b": "input_zero_point", "fc": "r_QuantizeLinear_Output"}),
    "casts": named({"y": "graph_input_cast_0", "r": "graph_output_cast_0", "output": "input_cast_to_fp32"}),
    "open Clip": open_clip,
    "mask": masked,
    "mask in a Gemm": infinite_bias,
    "pad": padded,
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_legal_file_is_quantized(case: str, mode: str, tmp_path: Path) -> None:
    source = CASES[case](tmp_path / "float.onnx")
    config = settings(source, mode, tmp_path / "run")
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0
    target = tmp_path / "run" / made(mode)
    before, after = onnx.load(str(source)), onnx.load(str(target))
    initializers = {one.name for one in before.graph.initializer}
    assert [one.name for one in before.graph.input if one.name not in initializers] == [
        one.name for one in after.graph.input
    ]
    assert [one.name for one in before.graph.output] == [one.name for one in after.graph.output]
    images = float_files.digits()[2][:100]
    exact, found = float_files.logits(source, images), float_files.logits(target, images)
    assert np.abs(found - exact).max() < 0.05 * np.ptp(exact)
    held = [numpy_helper.to_array(one) for one in after.graph.initializer]
    small = np.float16 if mode == "float16" else np.int8
    assert {value.dtype for value in held if value.ndim == 4 and value.size > 16} == {np.dtype(small)}


def test_nodes_of_branches_are_sorted_too(tmp_path: Path) -> None:
    path = float_files.with_branches(tmp_path / "float.onnx")
    model = onnx.load(str(path))
    assert [node.name for node in read(path).graph] == [node.name for node in model.graph.node]
    then = next(one.g for one in model.graph.node[2].attribute if one.name == "then_branch")
    then.node.append(helper.make_node("Relu", ["deeper"], ["then2"], "late"))
    then.node.append(helper.make_node("Relu", ["input"], ["deeper"], "early"))
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, str(path))
    graph = read(path).graph
    order = [node.name for node in graph]
    assert order.index("most") < order.index("yes") < order.index("outer") < order.index("pool")
    (branch,) = [n.attributes["then_branch"].as_graph() for n in graph if n.op_type == "If"]
    inner = [node.name for node in branch]
    assert inner.index("early") < inner.index("late")


def test_a_circle_is_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["input", "r"], ["y"], "sum"),
        helper.make_node("Relu", ["y"], ["r"], "relu"),
        *HEAD,
    ]
    path = by_hand(tmp_path / "file.onnx", nodes=nodes)
    with pytest.raises(
        ConfigError,
        match=r"the graph has a cycle: node '(sum|relu)' \((Add|Relu)\) depends on its own output",
    ):
        quantize_file.quantize(settings(path, "dynamic", tmp_path / "run"))
