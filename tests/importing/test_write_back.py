"""Tests of small ONNX files that are quantized and written back: outputs, kernels and changed nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from onnx_models import FLOAT, INT64, save
from small_nets import (
    Case,
    attention,
    begin_again,
    concat,
    conditions,
    constant_on_the_left,
    dense_block,
    depthwise,
    ends_in_the_middle,
    gate,
    gelu,
    gemms,
    groups,
    hard_swish,
    layer_norm,
    layer_scale,
    matmuls,
    moved,
    norm_behind_matmul,
    parts_with_other_readers,
    pools,
    residual,
    saved,
    several,
    shared,
    signals,
    silu,
    transposed,
    two_ends,
    uneven,
    uneven_stride,
)
from written import Written, difference, same, write

from qatkit import QATModule
from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.graph.convert.integer_modules import Quantized
from qatkit.importing import import_onnx
from qatkit.importing.write_back import write_back
from qatkit.quant.backends import FBGEMM, QNNPACK, TENSORRT, Backend
from qatkit.quant.granularity import PerChannel, PerTensor
from qatkit.quant.spec import QuantSpec
from qatkit_verify.errors import ConfigError
from qatkit_verify.installed import version_numbers
from qatkit_verify.saturation import saturates_here


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """Makes each test draw the same numbers, whatever ran before."""
    begin_again()


CASES = {
    "conv, norm, relu, residual": Case(residual, {"QLinearConv": 3, "QLinearAdd": 1, "QGemm": 1}, gone=3),
    "depthwise and Clip": Case(depthwise, {"QLinearConv": 3, "QGemm": 1}),
    "groups": Case(groups, {"QLinearConv": 2}),
    "Gemm": Case(gemms, {"QGemm": 3}, {"x": (4, 8)}, changed=1),
    "MatMul": Case(matmuls, {"MatMulIntegerToFloat": 2}, {"x": (4, 8)}, new={"Sum": 1}),
    "Concat": Case(concat, {"QLinearConv": 4, "QLinearConcat": 1}),
    "pools": Case(
        pools,
        {"QLinearConv": 3, "QLinearGlobalAveragePool": 1, "NhwcMaxPool": 1},
        gone=1,
        new={"Sum": 1, "GlobalAveragePool": 1, "Flatten": 1},
    ),
    "shared weights": Case(shared, {"QLinearConv": 3}),
    "two inputs, two outputs": Case(
        two_ends, {"QLinearConv": 3, "QLinearAdd": 1}, {"x": (1, 3, 8, 8), "y": (1, 3, 8, 8)}
    ),
    "uneven pads": Case(uneven, {"QLinearConv": 3}),
    "SiLU in parts": Case(silu, {"QLinearConv": 2, "QuickGelu": 2}, gone=4, new={"QuickGelu": 2}),
    "HardSwish in parts": Case(
        hard_swish,
        {"QLinearConv": 4, "QLinearMul": 3, "QLinearAdd": 3},
        gone=6,
        new={"Add": 3, "Mul": 2},
    ),
    "GELU in parts": Case(gelu, {"QLinearConv": 2, "Gelu": 1}, new={"Sum": 1}),
    "norm alone": Case(dense_block, {"QLinearConv": 4}, changed=1),
    "ConvTranspose": Case(
        transposed,
        {"QLinearConv": 4},
        gone=2,
        new={"Conv": 2, "DepthToSpace": 2, "Slice": 2},
    ),
    "MatMul behind moved axes": Case(moved, {"QLinearConv": 1, "MatMulIntegerToFloat": 2}, steps=1),
    "operators of several steps": Case(several, {"QLinearConv": 5}),
    "layer scale": Case(layer_scale, {"MatMulIntegerToFloat": 2}, {"x": (2, 5, 8)}, gone=2, steps=1),
    "norm behind a MatMul": Case(norm_behind_matmul, {"QGemm": 1}, {"x": (4, 8)}, gone=1, changed=1),
    "LayerNorm in parts": Case(
        layer_norm, {"QLinearConv": 2, "LayerNormalization": 1}, new={"Sum": 1}, steps=1
    ),
    "conditions": Case(conditions, {"QLinearConv": 3}),
    "signals": Case(
        signals,
        {"QLinearConv": 3},
        {"x": (2, 3, 32)},
        gone=1,
        new={"Conv": 1, "Shape": 2, "Slice": 5, "Concat": 2, "Reshape": 2, "Transpose": 1},
    ),
    "uneven stride": Case(
        uneven_stride,
        {"QLinearConv": 3},
        gone=1,
        new={"Conv": 1, "Shape": 3, "Slice": 7, "Concat": 3, "Reshape": 3, "Transpose": 1},
    ),
    "gate": Case(
        gate,
        {"QLinearConv": 3, "QLinearGlobalAveragePool": 1, "QLinearMul": 1, "QLinearSigmoid": 1},
        gone=1,
        new={"GlobalAveragePool": 1},
    ),
    "parts with other readers": Case(
        parts_with_other_readers,
        {"QLinearConv": 5, "QuickGelu": 1},
        gone=1,
        new={"QuickGelu": 1, "Sum": 1},
    ),
    "outputs in the middle": Case(ends_in_the_middle, {"QLinearConv": 4, "QLinearAdd": 1}, changed=1),
    "attention": Case(attention, {"MatMulIntegerToFloat": 5}, {"x": (2, 5, 16)}, steps=1),
    "constant on the left": Case(
        constant_on_the_left, {"QLinearConv": 1, "MatMulIntegerToFloat": 1}, steps=1
    ),
    "opset 11": Case(residual, {"QLinearConv": 3, "QLinearAdd": 1, "QGemm": 1}, gone=3, opset=11),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_file_gives_what_its_module_gives(case: Case, tmp_path: Path) -> None:
    source, feeds = saved(case, tmp_path)
    written = write(source, feeds)
    same(written, feeds, steps=case.steps)
    same(written, {name: torch.randn_like(value[:1]) for name, value in feeds.items()}, steps=case.steps)
    found = difference(source, written.path)
    assert (len(found.gone), len(found.changed)) == (case.gone, case.changed)
    assert found.new == case.new
    kernels = written.optimized()
    assert {name: kernels[name] for name in case.kernels} == dict(case.kernels)
    assert not {"Conv", "FusedConv", "FusedGemm", "Gemm"} & set(kernels)


def test_clip_that_ends_below_the_range_goes(tmp_path: Path) -> None:
    source, feeds = saved(CASES["depthwise and Clip"], tmp_path)
    wide = {name: value * 50 for name, value in feeds.items()}
    written = write(source, wide)
    assert not difference(source, written.path).gone
    names = {"/Conv_0_quant": "scale", "/Conv_0": "output_scale", "/Conv_2": "input_scale"}
    for name, scale in names.items():
        module: Any = written.converted.get_submodule(name)
        setattr(module, scale, getattr(module, scale) * 1.02)
        if scale == "input_scale":
            module.bias_scale = module.bias_scale * 1.02
    write_back(written.model, written.converted, written.path)
    assert difference(source, written.path).gone == {"/Clip_1"}
    same(written, wide)
    assert written.optimized()["QLinearConv"] == 3


@pytest.mark.parametrize("backend", [FBGEMM, QNNPACK, TENSORRT], ids=lambda one: one.name)
def test_every_backend(backend: Backend, tmp_path: Path) -> None:
    source, feeds = saved(CASES["conv, norm, relu, residual"], tmp_path)
    written = write(source, feeds, backend=backend)
    same(written, feeds, optimized=backend is FBGEMM)
    assert len(difference(source, written.path).gone) == 3


@pytest.mark.parametrize(
    ("case", "opset"),
    [
        *(("conv, norm, relu, residual", 13), ("MatMul", 13), ("MatMul", 21), ("uneven pads", 13)),
        *(("HardSwish in parts", 20), ("HardSwish in parts", 21), ("gate", 13)),
    ],
)
def test_activations_of_16_bits(case: str, opset: int, tmp_path: Path) -> None:
    """ONNX Runtime computes operators with 16-bit activations in float, and rounds these activations.

    It must not fuse a MatMul into a kernel that would round them to 8 bits.
    """
    source, feeds = saved(replace(CASES[case], opset=opset), tmp_path)
    written = write(source, feeds, backend=FBGEMM.with_activations("uint16").reduced("auto"))
    same(written, feeds, steps=0.02)
    pairs = [n for n in onnx.load(str(written.path)).graph.node if n.op_type == "QuantizeLinear"]
    assert pairs and {n.domain for n in pairs} == {"" if opset == 21 else "com.microsoft"}
    nodes = onnx.load(str(written.path)).graph.node
    makers = {n.output[0]: n.op_type for n in nodes}
    # With a Sum before its weight, ONNX Runtime 1.32 does not fuse a MatMul into MatMulNBits.
    assert {makers[n.input[1]] for n in nodes if n.op_type == "MatMul"} <= {"Sum"}
    assert not [
        kernel for kernel in written.optimized() if kernel.startswith(("QLinear", "QGemm", "MatMulI"))
    ]


def test_scales_per_tensor_need_no_opset_13(tmp_path: Path) -> None:
    source, feeds = saved(replace(CASES["groups"], opset=11), tmp_path)
    backend = replace(FBGEMM, weight=replace(FBGEMM.weight, granularity=PerTensor()))
    written = write(source, feeds, backend=backend)
    same(written, feeds)
    assert onnx.load(str(written.path)).opset_import[0].version == 11


def test_float_by_override_keeps_its_node(tmp_path: Path) -> None:
    source, feeds = saved(CASES["conv, norm, relu, residual"], tmp_path)
    written = write(source, feeds, overrides={"/Conv_3": OverrideConfig(float=True)})
    same(written, feeds)
    assert written.optimized()["QLinearConv"] == 2


def test_silu_in_int8_by_override(tmp_path: Path) -> None:
    source, feeds = saved(CASES["SiLU in parts"], tmp_path)
    written = write(source, feeds, overrides={"op/silu": OverrideConfig(int8=True)})
    same(written, feeds)
    kernels = written.optimized()
    assert (kernels["QLinearSigmoid"], kernels["QLinearMul"]) == (2, 2)


def test_batch_norm_that_trains(tmp_path: Path) -> None:
    source, feeds = saved(CASES["conv, norm, relu, residual"], tmp_path)
    written = write(source, feeds, schedule=ScheduleConfig(batch_norm="train"))
    same(written, feeds)
    assert len(difference(source, written.path).gone) == 3


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("case", ["ConvTranspose", "signals", "uneven stride"])
def test_a_transposed_convolution_that_stays_float(case: str, trained: bool, tmp_path: Path) -> None:
    source, feeds = saved(CASES[case], tmp_path)
    model = import_onnx(source)
    module = QATModule(model, feeds, overrides={"*ConvTranspose*": OverrideConfig(float=True)})
    module.mixed_scales = "report"
    module.calibrate([feeds])
    if trained:
        with torch.no_grad():
            for name, parameter in module.graph.named_parameters():
                if "ConvTranspose" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    written = Written(tmp_path / "int8.onnx", model, module.convert().graph, module)
    write_back(model, written.converted, written.path)
    same(written, feeds)
    ups = [
        {
            one.name: list(one.input[1:])
            for one in onnx.load(str(path)).graph.node
            if one.op_type == "ConvTranspose"
        }
        for path in (source, written.path)
    ]
    assert ups[0] and ups[0].keys() == ups[1].keys()
    assert (ups[0] == ups[1]) is not trained


newer = pytest.mark.skipif(
    version_numbers(onnxruntime.__version__) < version_numbers("1.27"),
    reason="QLinearConv takes zero points that differ between channels from ONNX Runtime 1.27 on",
)


def _asymmetric(dtype: str) -> Backend:
    bits = dtype == "int8" and saturates_here()  # 7 where 8 saturate: no guard supports zero points
    return replace(FBGEMM, weight=QuantSpec(dtype, granularity=PerChannel(0), reduce_range=bits))


@newer
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("case", ["conv, norm, relu, residual", "Gemm", "MatMul", "ConvTranspose"])
def test_weights_with_a_zero_point(case: str, dtype: str, tmp_path: Path) -> None:
    source, feeds = saved(CASES[case], tmp_path)
    model = onnx.load(str(source))
    for tensor in model.graph.initializer:  # moved away from zero, so that the zero point matters
        values = onnx.numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim > 1:
            moved = values + 2 * values.std()
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved.astype(np.float32), tensor.name))
    onnx.save(model, str(source))
    written = write(source, feeds, backend=_asymmetric(dtype))
    zeros = [one.weight_zero_point for one in written.converted.modules() if isinstance(one, Quantized)]
    assert any(bool(zero.any()) for zero in zeros)
    same(written, feeds)


@newer
@pytest.mark.parametrize("operator", ["Gather", "LSTM"])
def test_tables_and_gates_with_zero_points_are_refused(operator: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    if operator == "Gather":
        nodes = [helper.make_node("Gather", ["t", "x"], ["e"], "/rows")]
        inputs: dict[str, Any] = {"x": (INT64, ["n", 4])}
        constants = {"t": draw.uniform(1, 2, (9, 8)).astype(np.float32)}
        feeds = {"x": torch.randint(0, 9, (2, 4))}
    else:
        nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["", "h"], "/gates", hidden_size=8)]
        nodes.append(helper.make_node("Squeeze", ["h", "zero"], ["e"]))
        inputs = {"x": (FLOAT, [5, "n", 4])}
        constants = {"w": draw.uniform(1, 2, (1, 32, 4)).astype(np.float32), "zero": np.array([0])}
        constants["r"] = draw.uniform(1, 2, (1, 32, 8)).astype(np.float32)
        feeds = {"x": torch.randn(5, 2, 4)}
    constants["v"] = draw.normal(0, 1, (8, 3)).astype(np.float32)
    nodes.append(helper.make_node("MatMul", ["e", "v"], ["y"], "/product"))
    source = save(tmp_path / "m.onnx", nodes, inputs, ["y"], constants)
    with pytest.raises(ConfigError, match=r"cannot have (a table|weights) with zero points"):
        write(source, feeds, backend=_asymmetric("int8"))
    assert not list(tmp_path.glob("*int8*"))
