"""Tests of the audit against PyTorch's counts and ONNX Runtime's profile, and of allowed float operators."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from qdq_graphs import (
    IMAGE,
    INPUT_SCALE,
    OUTPUT_SCALE,
    TOKENS,
    QdqGraph,
    float_weight,
    matmul_add,
    self_quantized,
)
from quantized_resnet import Files, quantized_resnet18
from torch import nn

from qatkit.verify.audit import allowed, audit
from qatkit_verify.errors import ConfigError


@pytest.fixture(scope="module")
def resnet18() -> Files:
    return quantized_resnet18()


def _count_macs(module: nn.Module, image: torch.Tensor) -> int:
    """Returns the multiply-accumulates of one image, counted in PyTorch."""
    total = 0

    def hook(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        nonlocal total
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        total += output.numel() * weight[0].numel()

    handles = [
        layer.register_forward_hook(hook)
        for layer in module.modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    ]
    with torch.no_grad():
        module(image)
    for handle in handles:
        handle.remove()
    return total


def test_a_quantized_resnet_is_clean(resnet18: Files) -> None:
    result = audit(resnet18.int8_path)
    assert result.ok
    assert result.problems == ()
    assert len(result.matrix_nodes) == 21
    assert {node.precision for node in result.matrix_nodes} == {"int8"}
    # The exporter writes the global pool as a ReduceMean, which has no 8-bit kernel: the only float node.
    floats = [(node.op, node.reason) for node in result.nodes if node.precision == "float"]
    assert floats == [("ReduceMean", "ONNX Runtime has no 8-bit ReduceMean on the CPU")]
    assert result.macs == result.int8_macs == _count_macs(resnet18.module, torch.zeros(1, 3, 64, 64))
    assert (result.quantize, result.dequantize, result.transposes) == (2, 2, 2)
    assert result.runtime_dequantize == ()
    assert result.ops["QLinearConv"] == {"int8": 20}


def test_a_float_resnet_is_float_throughout(resnet18: Files) -> None:
    """NCHWc convolutions must be found although ONNX Runtime renames them and reorders their weights."""
    result = audit(resnet18.float_path)
    assert result.int8_share == 0
    assert result.macs == _count_macs(resnet18.module, torch.zeros(1, 3, 64, 64))
    matrix = result.matrix_nodes
    assert len(matrix) == len(result.problems) == 21
    assert len({node.source for node in matrix}) == 21
    assert all("weight is float in the file" in node.reason for node in matrix)


def test_precision_is_what_the_profiler_saw(resnet18: Files, tmp_path: Path) -> None:
    """In an independent profile, every node that the audit calls int8 must have 8-bit inputs."""
    settings = ort.SessionOptions()
    settings.log_severity_level, settings.enable_profiling = 3, True
    settings.profile_file_prefix = str(tmp_path / "p")
    session = ort.InferenceSession(resnet18.int8_path, settings, providers=["CPUExecutionProvider"])
    session.run(None, {"input": np.zeros((1, 3, 64, 64), np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    eight_bit = {
        event["name"].removesuffix("_kernel_time")
        for event in events
        if event["cat"] == "Node" and any("uint8" in tensor for tensor in event["args"]["input_type_shape"])
    }
    assert {node.name for node in audit(resnet18.int8_path).nodes if node.precision == "int8"} <= eight_bit


def test_fused_layer_norm_is_no_problem(tmp_path: Path) -> None:
    graph = QdqGraph()
    result = audit(graph.save(tmp_path / "good.onnx", graph.layer_norm("input", "ln"), TOKENS, 3))
    assert result.ok
    assert result.ops == {"LayerNormalization": {"float": 1}}


def test_attention_in_float_is_listed_but_no_problem(tmp_path: Path) -> None:
    graph = QdqGraph()
    query = matmul_add(graph)
    key = graph.node("Transpose", [query], "key", perm=[0, 2, 1])
    scores = graph.node("Softmax", [graph.node("MatMul", [query, key], "scores")], "softmax", axis=-1)
    result = audit(graph.save(tmp_path / "a.onnx", graph.node("MatMul", [scores, query], "mix"), TOKENS, 3))
    assert result.ok
    attention = {node.source: node.reason for node in result.matrix_nodes if node.precision == "float"}
    assert set(attention) == {"scores", "mix"}
    assert all("kept float by the backend" in reason for reason in attention.values())
    # By hand for 5 tokens (the dynamic batch is 1): 5x16x16 in int8, and twice 5x5x16 in float.
    tokens, width = 5, 16
    assert result.int8_macs == tokens * width * width
    assert result.macs == tokens * width * width + 2 * tokens * tokens * width


def test_operators_left_float_on_purpose(tmp_path: Path) -> None:
    graph = QdqGraph()
    path = graph.save(tmp_path / "f.onnx", float_weight(graph), IMAGE, 4)
    assert not audit(path).ok
    result = audit(path, allow_float=["c*"])
    assert result.ok
    assert [node.reason for node in result.matrix_nodes] == ["left float on purpose"]


def test_an_operator_left_float_that_runs_int8_is_a_problem(tmp_path: Path) -> None:
    graph = QdqGraph()
    path = graph.save(tmp_path / "f.onnx", self_quantized(graph), IMAGE, 4)
    assert "ONNX Runtime quantized it itself" in audit(path, allow_float=["c1"]).problems[0]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("features.3", True),
        ("features.3.conv", True),
        ("features.*.conv", True),
        ("features.3.con", False),
        ("features.30", False),
        ("*", True),
    ],
)
def test_patterns_name_operators_or_modules_above(pattern: str, matches: bool) -> None:
    assert allowed("features.3.conv", [pattern]) is matches


def test_session_options_reach_the_audit(tmp_path: Path) -> None:
    """Only with this session option does ONNX Runtime fuse operators whose int8 input has two readers."""
    graph = QdqGraph()
    image = graph.quantize("input", "in_q", INPUT_SCALE, zero=0, dtype=np.int8)
    pairs = [
        graph.quantize(graph.conv(image, name), f"{name}_q", OUTPUT_SCALE, zero=0, dtype=np.int8)
        for name in ("c1", "c2")
    ]
    path = graph.save(tmp_path / "i8.onnx", graph.node("Add", pairs, "add"), IMAGE, 4)
    assert audit(path, options={"session.qdqisint8allowed": "1"}).int8_share == 1


def test_a_file_with_other_dynamic_sizes_asks_for_the_shape(tmp_path: Path) -> None:
    graph = QdqGraph()
    path = graph.save(tmp_path / "d.onnx", graph.conv("input", "c1"), ("N", 16, "H", "W"), 4)
    with pytest.raises(ConfigError, match="give an array for this input"):
        audit(path)
    assert audit(path, input_shape=(1, 16, 4, 4)).macs == 16 * 4 * 4 * 16 * 9


def test_nodes_without_names_are_measured_too(tmp_path: Path) -> None:
    """At opset 14 HardSwish is a function that ONNX Runtime inlines into nodes without names."""
    graph = QdqGraph()
    swished = graph.node("HardSwish", [graph.node("HardSwish", ["input"], "a")], "b")
    path = graph.save(tmp_path / "h.onnx", swished, IMAGE, 4, opset=14)
    result = audit(path)
    assert result.ops == {"HardSigmoid": {"float": 2}, "Mul": {"float": 2}}
    assert all(node.microseconds is not None for node in result.nodes)
