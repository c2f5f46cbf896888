"""Tests of each export mode against the float file and against the mode's arithmetic in NumPy or PyTorch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import float_files
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from chain import noise, small_vit
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional as F

from qatkit.export import ort_modes
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.quant import spec
from qatkit.quant.backends import FBGEMM, QNNPACK, Backend
from qatkit.quant.granularity import PerChannel
from qatkit_verify.errors import ConfigError

MODES = ("dynamic", "static", "float16", "weight_only")
SIZES = {"dynamic": 0.3, "static": 0.3, "float16": 0.52, "weight_only": 0.3}


def make(mode: str, source: Path, target: Path, backend: Backend = FBGEMM) -> Path:
    if mode == "static":
        images = float_files.digits()[0][:256]
        ort_modes.static(source, target, np.split(images, 4), backend)
    else:
        getattr(ort_modes, mode)(source, target)
    return target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("modes")
    return {mode: make(mode, float_files.trained(), folder / f"{mode}.onnx") for mode in MODES}


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(str(path)).graph.node)


def constants(path: Path) -> dict[str, NDArray[np.generic]]:
    return {item.name: numpy_helper.to_array(item) for item in onnx.load(str(path)).graph.initializer}


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_accuracy_and_size_are_kept(mode: str, optimize: bool, made: dict[str, Path]) -> None:
    """Accuracy may drop by one of the 360 test images (0.28 points)."""
    source = float_files.trained()
    assert float_files.top1(source) > 95
    assert float_files.top1(made[mode], optimize=optimize) >= float_files.top1(source) - 0.3
    assert made[mode].stat().st_size <= SIZES[mode] * source.stat().st_size


def test_dynamic_files_hold_integer_operators(made: dict[str, Path]) -> None:
    """Only the depthwise Conv stays float."""
    kinds = operators(made["dynamic"])
    assert (kinds["ConvInteger"], kinds["MatMulInteger"], kinds["Conv"]) == (2, 2, 1)
    assert kinds["DynamicQuantizeLinear"] >= 4 - 1  # one for each input, shared by its readers
    assert kinds["MatMul"] == kinds["Gemm"] == kinds["BatchNormalization"] == 0
    weights = [
        value for value in constants(made["dynamic"]).values() if value.dtype == np.int8 and value.ndim > 1
    ]
    assert len(weights) == 4


def test_a_dynamic_conv_is_the_formula(tmp_path: Path) -> None:
    """Activations are uint8 in the range of this input, weights int8 in the range of each filter."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 8, 3)
    with torch.no_grad():
        conv.weight *= torch.logspace(-2, 0, 8)[:, None, None, None]  # per-tensor, the first would be 0 or 1
    images = noise(2, 3, 9, 9)
    export_onnx(conv.eval(), images, tmp_path / "conv.onnx")
    ort_modes.dynamic(tmp_path / "conv.onnx", tmp_path / "dynamic.onnx")

    low, high = min(float(images.min()), 0), max(float(images.max()), 0)
    scale = (high - low) / 255
    zero = round(-low / scale)
    rounded = (torch.clamp(torch.round(images / scale) + zero, 0, 255) - zero) * scale
    step = conv.weight.detach().abs().amax((1, 2, 3), keepdim=True) / 127
    weight = torch.round(conv.weight.detach() / step) * step
    assert conv.bias is not None
    expected = F.conv2d(rounded, weight, conv.bias.detach()).numpy()

    found = float_files.logits(tmp_path / "dynamic.onnx", images.numpy())
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_weights_alone_are_int8(made: dict[str, Path], tmp_path: Path) -> None:
    """Weights are within half a step of float; the float file with these weights gives the same outputs."""
    model, values = onnx.load(str(float_files.trained())), constants(made["weight_only"])
    stored = [
        node for node in onnx.load(str(made["weight_only"])).graph.node if node.op_type == "DequantizeLinear"
    ]
    rounded = {}
    for node in stored:
        integers, scale, zero = (values[name] for name in node.input)
        axis = node.attribute[0].i
        assert integers.dtype == zero.dtype == np.int8
        assert not zero.any()
        shape = [-1 if one == axis else 1 for one in range(integers.ndim)]
        rounded[node.output[0]] = integers.astype(np.float32) * np.asarray(scale).reshape(shape)
        assert np.abs(integers.astype(np.int64)).max() == 127
    assert len(rounded) == 5
    found = 0
    for item in model.graph.initializer:
        exact = numpy_helper.to_array(item)
        if item.name in rounded and exact.shape == rounded[item.name].shape:
            assert np.abs(rounded[item.name] - exact).max() <= 0.5001 * np.abs(exact).max() / 127
            item.CopyFrom(numpy_helper.from_array(rounded[item.name].astype(np.float32), item.name))
            found += 1
    assert found >= 3
    onnx.save(model, str(tmp_path / "rounded.onnx"))
    images = float_files.digits()[2][:50]
    expected = float_files.logits(tmp_path / "rounded.onnx", images)
    np.testing.assert_allclose(float_files.logits(made["weight_only"], images), expected, atol=0.05)
    options = {"session.disable_quant_qdq": "1"}
    folded = float_files.logits(made["weight_only"], images, entries=options)
    np.testing.assert_allclose(folded, float_files.logits(made["weight_only"], images), atol=1e-4)


def test_float16_keeps_its_inputs_and_outputs(made: dict[str, Path]) -> None:
    model = onnx.load(str(made["float16"]))
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.elem_type == TensorProto.FLOAT
    large = [item for item in model.graph.initializer if len(item.dims) > 1]
    assert len(large) == 5
    assert {item.data_type for item in large} == {TensorProto.FLOAT16}
    images = float_files.digits()[2]
    exact, half = (
        float_files.logits(float_files.trained(), images),
        float_files.logits(made["float16"], images),
    )
    assert 0 < np.abs(half - exact).max() < 5e-3 * np.abs(exact).max()


@pytest.mark.parametrize(("backend", "kind"), [(FBGEMM, np.uint8), (QNNPACK, np.int8)])
def test_static_follows_the_backend(backend: Backend, kind: type[np.generic], tmp_path: Path) -> None:
    path = make("static", float_files.trained(), tmp_path / "static.onnx", backend)
    model, values = onnx.load(str(path)), constants(path)
    activations = [values[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert activations and {value.dtype for value in activations} == {np.dtype(kind)}
    weights = {
        node.output[0]: node
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and values.get(node.input[0], np.zeros(1)).ndim == 4
    }
    assert len(weights) == 3
    for node in weights.values():
        integers, scale, zero = (values[name] for name in node.input)
        assert integers.dtype == np.int8 and not zero.any()
        assert scale.shape == (integers.shape[0],)


def test_static_leaves_a_residual_stream_float(tmp_path: Path) -> None:
    """In a transformer, only the inputs of Conv, Linear and MatMul are quantized."""
    images = noise(16, 3, 32, 32)
    export_onnx(small_vit(), images[:2], tmp_path / "vit.onnx")
    ort_modes.static(tmp_path / "vit.onnx", tmp_path / "static.onnx", [images.numpy()], FBGEMM)
    graph = onnx.load(str(tmp_path / "static.onnx")).graph
    dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    readers = {node.op_type for node in graph.node if dequantized.intersection(node.input)}
    assert {"Conv", "MatMul"} <= readers
    assert readers.isdisjoint({"Add", "Sub", "Mul", "Div", "Pow", "ReduceMean", "Softmax", "Erf"})
    exact = float_files.logits(tmp_path / "vit.onnx", images.numpy())
    found = float_files.logits(tmp_path / "static.onnx", images.numpy())
    assert np.abs(found - exact).mean() < 0.03 * np.abs(exact).max()


@pytest.mark.parametrize("part", ["activation", "weight"])
def test_a_type_that_the_quantizer_does_not_have_is_refused(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(spec.DTYPES, "int4", (torch.int8, -8, 7))
    int4 = spec.QuantSpec("int4", symmetric=True)
    backend = replace(FBGEMM, activation=int4) if part == "activation" else replace(FBGEMM, weight=int4)
    with pytest.raises(
        ConfigError,
        match=rf"backend=fbgemm: {part}\.dtype=int4: expected one of int8, uint8 with mode=static",
    ):
        make("static", float_files.trained(), tmp_path / "static.onnx", backend)
    assert not any(tmp_path.iterdir())


def test_the_tool_has_no_zero_points_of_channels(tmp_path: Path) -> None:
    """ONNX Runtime's quantizer would silently make per-channel weights symmetric.

    Per-tensor weights can have a zero point.
    """
    backend = replace(FBGEMM, weight=spec.QuantSpec("int8", granularity=PerChannel(0)))
    message = r"backend=fbgemm: weight\.symmetric=false: expected true with mode=static"
    with pytest.raises(ConfigError, match=message):
        make("static", float_files.trained(), tmp_path / "static.onnx", backend)
    assert not any(tmp_path.iterdir())
    whole = replace(FBGEMM, weight=spec.QuantSpec("int8"))
    make("static", float_files.trained(), tmp_path / "static.onnx", whole)
    graph, held = onnx.load(tmp_path / "static.onnx").graph, constants(tmp_path / "static.onnx")
    pairs = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    zeros = [held[pairs[node.input[1]].input[2]] for node in graph.node if node.op_type == "Conv"]
    assert len(zeros) > 1 and all(zero.ndim == 0 for zero in zeros) and any(zeros)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_preparing_a_file_takes_time_linear_in_its_operators(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of 80 MatMuls may look at values about 4 times as often as a chain of 20."""
    looked = Counter[int]()
    of = ir.Value.is_initializer

    def counting(value: ir.Value) -> bool:
        looked[length] += 1
        return of(value)

    monkeypatch.setattr(ir.Value, "is_initializer", counting)
    for length in (20, 80):
        names = ["f", *(f"m{i}" for i in range(length))]
        nodes = [
            helper.make_node("GlobalAveragePool", ["input"], ["p"], "pool"),
            helper.make_node("Flatten", ["p"], ["f"], "flatten"),
            *(
                helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], f"mul{i}")
                for i in range(length)
            ),
            helper.make_node("Gemm", [names[-1], "fc"], ["output"], "fc", transB=1),
        ]
        weights = {f"w{i}": np.eye(3) + i for i in range(length)} | {"fc": np.ones((10, 3))}
        path = float_files.by_hand(tmp_path / f"{length}.onnx", nodes=nodes, weights=weights)
        make(mode, path, tmp_path / f"{length}.made.onnx")
    assert looked[80] < 5 * looked[20]


AGAIN = """
import sys
from pathlib import Path
from test_ort_modes import MODES, make
for mode in MODES:
    make(mode, Path(sys.argv[1]), Path(sys.argv[2]) / mode)
"""


def test_the_same_file_gives_the_same_bytes(made: dict[str, Path], tmp_path: Path) -> None:
    """The second run is in another process, with another hash seed and another folder."""
    here = Path(__file__).parent
    search = os.pathsep.join(
        [str(here), str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": search, "PYTHONHASHSEED": "7"}
    arguments = [sys.executable, "-c", AGAIN, str(float_files.trained()), str(tmp_path)]
    subprocess.run(arguments, env=environment, check=True, capture_output=True, timeout=200)
    for mode, path in made.items():
        digests = {hashlib.sha256(file.read_bytes()).hexdigest() for file in (path, tmp_path / mode)}
        assert len(digests) == 1, mode
