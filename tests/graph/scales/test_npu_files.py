"""Tests of NPU files (`backend=npu_cnn`) from torch and ONNX: shared scales, fused activations and shifts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from chain import Shipped, noise, run_ort, run_torch, ship
from npu_nets import FUSED, EveryKind, OutOfBounds, Pairs

from qatkit import QATModule
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.importing import import_onnx
from qatkit.importing.write_back import write_back
from qatkit.quant.backends import NPU_CNN, NPU_TRANSFORMER
from qatkit.quant.granularity import PerChannel
from qatkit.verify.audit import audit
from qatkit_verify.errors import ConfigError


@pytest.fixture(scope="module")
def every_kind() -> Shipped:
    torch.manual_seed(0)
    return ship(EveryKind().eval(), noise(16, 3, 12, 12), "npu", NPU_CNN)


@pytest.fixture(scope="module")
def given_file(every_kind: Shipped, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the INT8 file made from `every_kind`'s network via a float ONNX file."""
    folder = tmp_path_factory.mktemp("given")
    export_onnx(every_kind.model, every_kind.images[:2], folder / "float.onnx")
    model = import_onnx(folder / "float.onnx")
    module = QATModule(model, every_kind.images[:2], backend=NPU_CNN)
    module.calibrate([every_kind.images])
    write_back(model, module.convert().graph, folder / "int8.onnx")
    return folder / "int8.onnx"


@pytest.fixture(params=["torch", "given"])
def file(request: pytest.FixtureRequest, every_kind: Shipped, given_file: Path) -> Pairs:
    return Pairs(every_kind.path if request.param == "torch" else given_file)


def test_everything_is_int8_by_powers_of_two(file: Pairs) -> None:
    pairs = file.of("QuantizeLinear", "DequantizeLinear")
    assert len(pairs) > 40
    for pair in pairs:
        zero = file.constants[pair.input[2]]
        assert zero.dtype == np.int8 and not zero.any()
        assert abs(file.position(pair)) < 30
    assert len(file.bias_shifts()) == 7  # each operator has a bias with its own Q/DQ pair


def test_what_only_moves_or_averages_has_one_scale(file: Pairs) -> None:
    assert len(file.of("Concat", "AveragePool", "GlobalAveragePool", "MaxPool", "Transpose")) == 5
    assert file.unequal() == []


def test_scales_of_any_size_are_shared_around_concat_alone() -> None:
    torch.manual_seed(0)
    spec = replace(NPU_CNN.activation, scale_type="float", bias_dtype="int32")
    backend = replace(NPU_CNN, activation=spec, weight=spec)
    file = Pairs(ship(EveryKind().eval(), noise(16, 3, 12, 12), "npu_float", backend).path)
    for node in file.of("Concat", "MaxPool", "AveragePool", "GlobalAveragePool"):
        around = [*(file.before(node, at) for at in range(len(node.input))), file.after(node)]
        scales = {float(file.constants[one.input[1]]) for one in around if one is not None}
        assert (len(scales) == 1) == (node.op_type in ("Concat", "MaxPool")), node.op_type


def test_no_pair_stands_before_a_fused_activation(file: Pairs) -> None:
    activations = file.of(*FUSED)
    assert {node.op_type for node in activations} >= {"Relu", "Clip", "LeakyRelu", "PRelu"}
    for node in activations:
        assert file.made[node.input[0]].op_type in ("Conv", "Gemm", "Add")
        assert [one.op_type for one in file.readers[node.output[0]]] == ["QuantizeLinear"]
    for node in file.of("ConvTranspose"):  # a GELU follows it, which is one operator only from opset 20 on
        assert "QuantizeLinear" not in [one.op_type for one in file.readers[node.output[0]]]


def test_the_file_computes_what_the_module_does(every_kind: Shipped) -> None:
    images = noise(32, 3, 12, 12, seed=10)
    converted = run_torch(every_kind.converted, images)
    step = 2.0 ** -Pairs(every_kind.path).position(Pairs(every_kind.path).of("QuantizeLinear")[-1])
    options = dict(NPU_CNN.session_options)
    for optimize in (False, True):
        found = run_ort(every_kind.path, images, optimize=optimize, options=options)
        assert np.abs(found - converted).max() <= step and (found != converted).mean() < 0.02


def test_the_report_names_scales_that_are_shared(every_kind: Shipped) -> None:
    lines = [reason for _, reason in every_kind.conversion.skipped]
    assert any(
        " because it is shared with " in line and line.startswith("the scale was changed from 2^")
        for line in lines
    )


def test_shifts_are_within_the_bounds_of_the_hardware() -> None:
    images = OutOfBounds.images(16)
    free = replace(NPU_CNN, shifts=None)
    unbounded = Pairs(ship(OutOfBounds().eval(), images, "npu_free", free).path)
    assert max(unbounded.cuts().values()) > 16 and min(unbounded.cuts().values()) < 0
    assert max(unbounded.reads()) > 7

    case = ship(OutOfBounds().eval(), images, "npu_bounds", NPU_CNN)
    file = Pairs(case.path)
    assert all(0 <= cut <= 16 for cut in file.cuts().values())
    assert all(0 <= shift <= 15 for shift in file.bias_shifts())
    assert all(apart <= 7 for apart in file.reads())
    lines = dict(case.conversion.skipped)
    assert {"fine", "coarse"} <= lines.keys()
    assert lines["fine"].startswith("the scale of its weight was changed from 2^")
    assert "to keep the shift within bounds" in lines["fine"]
    assert any("to keep the shifts around it within bounds" in line for line in lines.values())


def test_the_report_counts_the_moved_scales_of_a_weight() -> None:
    """Only the scales of the two finer channels move; the largest one stays."""
    net = OutOfBounds().eval()
    with torch.no_grad():
        net.fine.weight[0] = 1.0
    backend = replace(NPU_CNN, weight=replace(NPU_CNN.weight, granularity=PerChannel(0)))
    module = QATModule(net, OutOfBounds.images(2), backend=backend)
    module.calibrate([OutOfBounds.images(16)])
    line = dict(module.convert().skipped)["fine"]
    # 1e-4 / 127 is nearest to 2^-20; the shift of 16 allows 2^-14.
    assert line.startswith(
        "2 of 3 scales of its weight were changed (the most from 2^-20 to 2^-14), to keep "
    )


def test_the_audit_names_a_shift_out_of_bounds() -> None:
    case = ship(OutOfBounds().eval(), OutOfBounds.images(16), "npu_free", replace(NPU_CNN, shifts=None))
    found = audit(case.path, other_runtime=NPU_CNN.other_runtime, options=NPU_CNN.session_options)
    wrong = [line for line in found.problems if "its shift is" in line]
    assert len(wrong) == sum(not 0 <= cut <= 16 for cut in Pairs(case.path).cuts().values())


def test_a_transformer_has_int8_products_alone() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(12, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 5)
    ).eval()
    case = ship(net, noise(16, 12), "npu_transformer", NPU_TRANSFORMER)
    graph = onnx.load(str(case.path)).graph
    file = Pairs(case.path)
    gemms = [node for node in graph.node if node.op_type == "Gemm"]
    assert len(gemms) == 2 and all(file.before(gemm, at) is not None for gemm in gemms for at in range(3))
    assert [one.op_type for one in file.readers[gemms[0].output[0]]] != ["QuantizeLinear"]
    assert [one.op_type for one in file.readers[gemms[1].output[0]]] == ["QuantizeLinear"]


def test_shared_scales_need_symmetric_activations() -> None:
    with pytest.raises(ConfigError, match=r"activation\.symmetric=false: expected true, since this backend"):
        replace(NPU_TRANSFORMER, aligned=("cat",))
