"""Tests of the TensorRT backend: files have Q/DQ pairs as TensorRT needs them, and the module's outputs."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import float_files
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from chain import SMALL, Chain, Residual, Shipped, build, noise, run_ort, run_torch, settle, ship, small_vit
from onnx import numpy_helper
from torch import nn

from qatkit.config.schema import OverrideConfig
from qatkit.export import ort_modes
from qatkit.quant.backends import TENSORRT
from qatkit.verify.audit import audit
from qatkit.verify.graph_view import constant, element_type, made_by, read_model

NAMES = ("chain", "mlp", "residual", "conv_flatten_linear", "block", "gate", "hard_gate", "concat", "gated",
         "twice", "vit")  # fmt: skip


def shipped(name: str) -> Shipped:
    torch.manual_seed(0)
    if name == "vit":
        model, images = small_vit(), noise(16, 3, 32, 32)
    else:
        kind, shape = SMALL[name]
        model, images = settle(kind(), *shape), noise(16, *shape)
    return ship(model, images, f"{name}_tensorrt", backend=TENSORRT)


def maker(value: ir.Value | None) -> ir.Node:
    """Returns the node that computes `value`."""
    node = value.producer() if value is not None else None
    assert node is not None
    return node


def assert_symmetric(path: Path) -> ir.Graph:
    """Returns the graph of a file after checking its form for TensorRT.

    All Q/DQ pairs must be int8 with zero_point 0, activations per-tensor, weights of Conv and Gemm per-channel
    and their biases float. A Sum, which other backends use as a barrier, must not occur.
    """
    graph = read_model(path).graph
    for node in graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        zero, scale = (constant(node.inputs[i]) for i in (2, 1))
        assert zero is not None and scale is not None
        assert zero.dtype == np.int8 and not zero.any(), node.name
        stored = element_type(node.inputs[0])
        assert stored is None or stored == ir.DataType.INT8
        assert scale.ndim == 0 or stored is not None
    for node in graph:
        if node.op_type in ("Conv", "Gemm"):
            x, w, *bias = node.inputs
            pairs = [made_by(value, "DequantizeLinear") for value in (x, w)]
            assert pairs[0] is not None and pairs[1] is not None, node.name
            scale = constant(pairs[1].inputs[1])
            assert scale is not None and scale.ndim == 1  # one scale per channel
            assert all(element_type(b) == ir.DataType.FLOAT for b in bias)
        assert node.op_type != "Sum"  # no Sum as a barrier
    return graph


@pytest.mark.parametrize("name", NAMES)
def test_tensorrt_gets_pairs_it_accepts_and_outputs_agree(name: str) -> None:
    case = shipped(name)
    assert_symmetric(case.path)
    found = audit(case.path, options=TENSORRT.session_options, other_runtime=TENSORRT.other_runtime)
    assert found.ok, found.problems
    floats = [node for node in found.matrix_nodes if node.precision != "int8"]
    assert {node.reason for node in floats} <= {"both operands are activations"}
    assert len(found.matrix_nodes) > len(floats) == {"vit": 4, "block": 2}.get(name, 0)
    images = torch.cat([case.images, noise(*case.images.shape, seed=7)])
    want, exact = run_torch(case.converted, images), run_torch(case.model, images)
    span = float(np.ptp(exact))
    for optimize in (False, True):
        got = run_ort(case.path, images, optimize=optimize, options=TENSORRT.session_options)
        assert np.abs(got - want).mean() < 1e-3 * span
        assert np.abs(got - want).max() < 0.02 * span
    assert np.abs(want - exact).mean() < 0.02 * span
    np.testing.assert_allclose(run_torch(case.simulated, images), want, atol=0.02 * span)


def test_tensorrt_quantizes_one_branch_of_a_sum_and_keeps_relu() -> None:
    """TensorRT fuses Conv, Add and ReLU if the shortcut is int8 and nothing else follows the Conv."""
    graph = assert_symmetric(shipped("residual").path)
    add = next(node for node in graph if node.op_type == "Add")
    assert sorted(maker(value).op_type for value in add.inputs) == ["Conv", "DequantizeLinear"]
    assert [node.op_type for node in add.outputs[0].consumers()] == ["Relu"]
    assert sum(node.op_type == "Relu" for node in graph) == 3


def test_of_two_convolutions_the_shortcut_is_quantized() -> None:
    graph = assert_symmetric(ship(build("resnet18", 32), noise(4, 3, 32, 32), "trt", backend=TENSORRT).path)
    joined = [[maker(value) for value in node.inputs] for node in graph if node.op_type == "Add"]
    assert len(joined) == 8
    for main, shortcut in joined:
        assert main.op_type == "Conv" and shortcut.op_type == "DequantizeLinear"
    behind = [maker(maker(pair[1].inputs[0]).inputs[0]) for pair in joined]
    assert sum("downsample" in str(node.name) for node in behind) == 3


def test_a_relu_without_a_convolution_is_not_lost() -> None:
    """A symmetric range keeps negative values, so only the ReLU itself makes them zero."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.last = nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1, bias=False)
            self.first.bias = nn.Parameter(torch.full((4,), -100.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, self.last(self.relu(self.first(x))))

    case = ship(Clamped().eval(), noise(4, 3, 4, 4), "clamped", backend=TENSORRT)
    assert not run_torch(case.converted, case.images).any()
    assert not run_ort(case.path, case.images).any()


def test_the_audit_names_what_tensorrt_refuses(tmp_path: Path) -> None:
    torch.manual_seed(0)
    good = ship(settle(Chain(), 3, 12, 12), noise(4, 3, 12, 12), "good", backend=TENSORRT).path
    for_x86 = ship(settle(Chain(), 3, 12, 12), noise(4, 3, 12, 12), "x86").path
    lines = "\n".join(audit(for_x86, other_runtime=TENSORRT.other_runtime).problems)
    assert "quantized to uint8; TensorRT accepts only int8" in lines
    assert "its bias is quantized; TensorRT needs it in float" in lines

    model = onnx.load(str(good))
    quantize = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    zero = next(item for item in model.graph.initializer if item.name == quantize.input[2])
    zero.CopyFrom(numpy_helper.from_array(np.array(3, np.int8), zero.name))
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    pair = next(node for node in model.graph.node if node.output[0] == conv.input[0])
    conv.input[0] = next(n for n in model.graph.node if n.output[0] == pair.input[0]).input[0]
    onnx.save(model, str(tmp_path / "broken.onnx"))
    lines = "\n".join(audit(tmp_path / "broken.onnx", other_runtime=TENSORRT.other_runtime).problems)
    assert "zero point 3; TensorRT accepts only 0" in lines
    assert f"'{conv.name}': its input has no DequantizeLinear" in lines


def test_an_operator_left_float_is_no_problem() -> None:
    overrides = {"conv1": OverrideConfig(float=True)}
    torch.manual_seed(0)
    case = ship(settle(Residual(), 3, 12, 12), noise(4, 3, 12, 12), "part", TENSORRT, overrides)
    found = audit(case.path, options=TENSORRT.session_options, other_runtime=TENSORRT.other_runtime)
    assert len(found.problems) == 1 and "its weight is float" in found.problems[0]
    assert audit(case.path, other_runtime=TENSORRT.other_runtime, allow_float=["conv1"]).ok


def test_a_float_file_becomes_one_for_tensorrt(tmp_path: Path) -> None:
    images = float_files.digits()[2]
    ort_modes.static(float_files.trained(), tmp_path / "made.onnx", [images[:64]], TENSORRT)
    assert_symmetric(tmp_path / "made.onnx")
    assert audit(
        tmp_path / "made.onnx", other_runtime=TENSORRT.other_runtime, input_shape=(1, *images.shape[1:])
    ).ok
    assert float_files.top1(tmp_path / "made.onnx") >= float_files.top1(float_files.trained()) - 3
