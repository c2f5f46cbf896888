"""Tests of exported files: contents, execution, equal bytes, and no partial file after a failed export."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
import pytest
import torch
from chain import Mlp, noise, reach, run_ort, run_torch, shipped, small_vit
from onnx import NodeProto, TensorProto, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.verify.audit import audit
from qatkit_verify.errors import ConfigError

LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("mobilenet_v3_small", "efficientnet_b0")]
NETWORKS = ["chain", "residual", "block", "hard_gate", "concat", "resnet18", "mobilenet_v2", "vit", *LARGE]
CNNS = [name for name in NETWORKS if name not in ("block", "vit")]


class File:
    """An ONNX file with its nodes and tensors by name."""

    def __init__(self, path: Path) -> None:
        self.proto = onnx.load(str(path))
        self.nodes = list(self.proto.graph.node)
        self.tensors = {t.name: numpy_helper.to_array(t) for t in self.proto.graph.initializer}
        self.maker = {name: node for node in self.nodes for name in node.output}
        self.counts = Counter(node.op_type for node in self.nodes)

    def all(self, *kinds: str) -> list[NodeProto]:
        return [node for node in self.nodes if node.op_type in kinds]


def attribute(node: NodeProto, name: str) -> int | None:
    return next((a.i for a in node.attribute if a.name == name), None)


def contents(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("name", NETWORKS)
def test_header(name: str) -> None:
    proto = File(shipped(name).path).proto
    onnx.checker.check_model(proto, full_check=True)
    with_silu = name == "efficientnet_b0"  # a com.microsoft node, whose function is in the file
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", 13), ("com.microsoft", 1)][
        : 1 + with_silu
    ]
    assert proto.ir_version == 8 and len(proto.functions) == with_silu
    assert [v.name for v in proto.graph.input] == ["input"]
    assert [v.name for v in proto.graph.output] == ["output"]
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_int8_and_biases_int32_at_the_scales_product(name: str) -> None:
    file = File(shipped(name).path)
    checked = 0
    for node in file.all("Conv", "Gemm"):
        read = [file.maker[tensor] for tensor in node.input]
        assert {r.op_type for r in read} == {"DequantizeLinear"}
        weight, scale, zero = (file.tensors[t] for t in read[1].input)
        assert weight.dtype == np.int8 and zero.dtype == np.int8 and not zero.any()
        assert scale.shape == zero.shape == (weight.shape[0],)
        assert attribute(read[1], "axis") == 0
        depthwise = node.op_type == "Conv" and weight.shape[1] == 1 < len(weight)
        largest = (
            np.abs(weight.astype(int)).max() if depthwise else reach(torch.from_numpy(weight.copy())).max()
        )
        assert int(largest) in (126, 127, 128)
        assert node.op_type == "Conv" or attribute(node, "transB") == 1
        if len(read) == 3:
            bias, bias_scale = (file.tensors[t] for t in read[2].input)
            assert bias.dtype == np.int32  # it has no zero point, which is 0 by default
            np.testing.assert_allclose(bias_scale, scale * file.tensors[read[0].input[1]], rtol=1e-6)
            assert bias.shape == bias_scale.shape and attribute(read[2], "axis") == 0
        checked += 1
    assert checked == sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in shipped(name).model.modules()) + sum(
        isinstance(m, nn.MultiheadAttention) for m in shipped(name).model.modules()
    )  # its in_proj is not a module


@pytest.mark.parametrize("name", NETWORKS)
def test_activations_have_one_pair_each_with_rank_0_parameters(name: str) -> None:
    file = File(shipped(name).path)
    constants = 0
    for node in file.all("QuantizeLinear", "DequantizeLinear"):
        source = file.tensors.get(node.input[0])
        if source is not None and source.dtype in (np.int8, np.int32):
            constants += 1
            continue
        scale, zero = (file.tensors[t] for t in node.input[1:])
        assert scale.shape == zero.shape == () and scale.dtype == np.float32 and zero.dtype == np.uint8
        assert attribute(node, "axis") is None
    assert constants and file.counts["QuantizeLinear"]
    per_tensor = Counter(node.input[0] for node in file.all("QuantizeLinear"))
    assert max(per_tensor.values()) == 1


@pytest.mark.parametrize("name", CNNS)
def test_global_pooling_has_its_own_operator(name: str) -> None:
    file = File(shipped(name).path)
    pools = sum(isinstance(m, nn.AdaptiveAvgPool2d) for m in shipped(name).model.modules())
    if name == "mobilenet_v2":
        pools += 1  # it calls the function instead
    assert file.counts["GlobalAveragePool"] == pools
    assert file.counts["ReduceMean"] == 0


@pytest.mark.parametrize("name", ["chain", "residual", "resnet18", "mobilenet_v2"])
def test_activations_and_norms_are_absorbed(name: str) -> None:
    model, counts = shipped(name).model, File(shipped(name).path).counts
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert not {"Relu", "Clip", "Min", "Max", "BatchNormalization", "Dropout", "Identity"} & set(counts)


@pytest.mark.parametrize("name", ["mlp", "block", "vit", "resnet18", *LARGE])
def test_every_linear_is_a_gemm(name: str) -> None:
    model, file = shipped(name).model, File(shipped(name).path)
    linears = sum(isinstance(m, (nn.Linear, nn.MultiheadAttention)) for m in model.modules())
    assert file.counts["Gemm"] == linears  # MultiheadAttention counts for its in_proj
    for node in file.all("MatMul"):  # only for two activations
        assert not any(
            t in file.tensors or (t in file.maker and file.maker[t].input[0] in file.tensors)
            for t in node.input
        )


@pytest.mark.parametrize("name", NETWORKS)
def test_onnx_runtime_runs_every_matrix_in_int8(name: str) -> None:
    found = audit(shipped(name).path)
    assert found.problems == () and found.runtime_dequantize == ()
    assert {n.precision for n in found.nodes if n.op in ("QLinearConv", "QGemm", "Conv", "Gemm")} == {"int8"}


@pytest.mark.parametrize("name", NETWORKS)
def test_batch_is_dynamic(name: str) -> None:
    path, images = shipped(name).path, shipped(name).images[:3]
    three = run_ort(path, images)
    assert len(three) == 3
    for i in range(3):
        np.testing.assert_allclose(run_ort(path, images[i : i + 1])[0], three[i], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_nodes_are_named_after_modules(name: str) -> None:
    network = shipped(name)
    file = File(network.path)
    names = [node.name for node in file.nodes]
    assert all(names) and len(set(names)) == len(names)
    convs = {f"{path}/Conv" for path, m in network.model.named_modules() if isinstance(m, nn.Conv2d)}
    found = {node.name for node in file.all("Conv")}
    assert found == convs
    modules = {path for path, _ in network.model.named_modules()}
    linears = {node.name.removesuffix("/Gemm") for node in file.all("Gemm")}
    assert {p for p in linears if not p.endswith("qkv")} <= modules


def test_names_of_resnet() -> None:
    names = {node.name for node in File(shipped("resnet18").path).nodes}
    assert {"conv1/Conv", "layer1.0.conv1/Conv", "layer2.0.downsample.0/Conv", "fc/Gemm"} <= names
    assert {"layer1.0.add/Add", "maxpool/MaxPool", "avgpool/GlobalAveragePool"} <= names


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_of_this_machine_is_in_the_file(name: str) -> None:
    data, proto = shipped(name).path.read_bytes(), File(shipped(name).path).proto
    here = {
        os.getcwd(),
        str(Path.home()),
        sys.prefix,
        str(Path(torch.__file__).parent),
        str(shipped(name).path),
    }
    for text in (*here, socket.gethostname(), "site-packages", ".py", "pkg.torch", "/tmp"):
        assert len(text) < 4 or text.encode() not in data, text
    assert not proto.metadata_props and not proto.doc_string and not proto.graph.doc_string
    assert not any(node.metadata_props or node.doc_string for node in proto.graph.node)
    assert (proto.producer_name, proto.producer_version) == ("qatkit", "")


@pytest.mark.parametrize("name", ["residual", "block", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_two_exports_are_equal_bytes(name: str, tmp_path: Path) -> None:
    network, path = shipped(name), tmp_path / "again.onnx"
    export_onnx(network.converted, network.images[:2], path)
    assert path.read_bytes() == network.path.read_bytes()


@pytest.mark.slow
def test_two_processes_write_equal_bytes(tmp_path: Path) -> None:
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); from chain import shipped;"
        "files = [shipped(n).path.read_bytes() for n in ('residual', 'block', 'vit')];"
        "print([hashlib.sha256(f).hexdigest() for f in files])"
    )
    found = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parents[1])],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.add(done.stdout.strip().splitlines()[-1])
    assert len(found) == 1 and len(found.pop()) > 3 * 64


@pytest.mark.parametrize("opset", [12, 24, 0])
def test_opsets_out_of_range_are_refused(opset: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"export\.opset.*{opset}.*13 to 23"):
        export_onnx(Mlp(), noise(2, 12), tmp_path / "model.onnx", opset=opset)
    assert contents(tmp_path) == []


@pytest.mark.parametrize("name", ["residual", "block"])
def test_static_batch(name: str, tmp_path: Path) -> None:
    network, path = shipped(name), tmp_path / "model.onnx"
    export_onnx(network.converted, network.images[:2], path, dynamic_batch=False)
    dims = onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_value for d in dims] == list(network.images[:2].shape)
    expected = run_ort(network.path, network.images[:2])
    np.testing.assert_allclose(run_ort(path, network.images[:2]), expected, rtol=0, atol=1e-5)


def test_a_module_of_several_outputs(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.relu(), x.sum(1)

    x = noise(3, 4)
    export_onnx(Two().eval(), x[:2], tmp_path / "model.onnx")
    session = ort.InferenceSession(str(tmp_path / "model.onnx"))
    assert [one.name for one in session.get_outputs()] == ["output_0", "output_1"]
    for found, wanted in zip(session.run(None, {"input": x.numpy()}), Two()(x), strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6, atol=1e-6)


def test_float_models_export_too(tmp_path: Path) -> None:
    model, images = small_vit(), noise(3, 3, 32, 32)
    export_onnx(model, images[:2], tmp_path / "model.onnx")
    found = run_ort(tmp_path / "model.onnx", images)
    np.testing.assert_allclose(found, run_torch(model, images), atol=1e-4)


class _GridSample(nn.Module):
    """A model of an operator that ONNX has had since opset 16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False)


@torch.library.custom_op("qatkit_tests::mystery", mutates_args=())
def _mystery(x: Tensor) -> Tensor:
    return x.flip(0)


@_mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class _Mystery(nn.Module):
    """A model of an operator that ONNX does not have."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.qatkit_tests.mystery(x)
        return result


@pytest.mark.parametrize(("model", "names"), [(_GridSample(), "GridSample"), (_Mystery(), "mystery")])
def test_a_failed_export_leaves_no_file_and_touches_none(
    model: nn.Module, names: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=names):
        export_onnx(model, noise(2, 3, 8, 8), tmp_path / "model.onnx")
    assert contents(tmp_path) == []
    (tmp_path / "model.onnx").write_bytes(b"the last good one")
    with pytest.raises(ValueError, match=names):
        export_onnx(model, noise(2, 3, 8, 8), tmp_path / "model.onnx")
    assert contents(tmp_path) == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == b"the last good one"


def test_grid_sample_exports_at_an_opset_that_has_it(tmp_path: Path) -> None:
    images = noise(2, 3, 8, 8)
    export_onnx(_GridSample(), images, tmp_path / "model.onnx", opset=16)
    found = run_ort(tmp_path / "model.onnx", images)
    np.testing.assert_allclose(found, run_torch(_GridSample(), images), atol=1e-5)


def test_an_existing_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"x" * 10_000_000)
    export_onnx(Mlp(), noise(2, 12), path)
    onnx.checker.check_model(str(path), full_check=True)
    assert contents(tmp_path) == ["model.onnx"]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_weights_are_stored_in_one_byte(name: str) -> None:
    parameters = sum(p.numel() for p in shipped(name).model.parameters())
    assert shipped(name).path.stat().st_size < parameters * 1.2
    weights = [p for p in shipped(name).model.parameters() if p.ndim in (2, 4)]
    matrices = sum(p.numel() for p in weights) + weights[0][:, 0].numel()  # for a fourth image channel
    stored = sum(
        math.prod(t.dims)
        for t in File(shipped(name).path).proto.graph.initializer
        if t.data_type == TensorProto.INT8 and len(t.dims) > 1
    )
    assert stored == matrices


def test_silu_is_one_node_with_a_body_of_standard_operators(tmp_path: Path) -> None:
    """ONNX Runtime keeps the QuickGelu node; inlined for other runtimes, its function computes the same."""
    case = shipped("gated")
    model = onnx.load(str(case.path))
    assert [(f.domain, f.name) for f in model.functions] == [("com.microsoft", "QuickGelu")]
    optimized, inlined = tmp_path / "optimized.onnx", tmp_path / "inlined.onnx"
    options = ort.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(optimized)
    ort.InferenceSession(str(case.path), options, providers=["CPUExecutionProvider"])
    assert [n.op_type for n in onnx.load(str(optimized)).graph.node].count("QuickGelu") == 1
    standard = onnx.inliner.inline_local_functions(model)
    assert {n.domain for n in standard.graph.node} == {""} and not standard.functions
    onnx.save(standard, str(inlined))
    for optimize in (False, True):
        expected = run_ort(case.path, case.images, optimize=optimize)
        np.testing.assert_array_equal(run_ort(inlined, case.images, optimize=optimize), expected)


def test_a_model_without_silu_has_no_functions_and_one_opset() -> None:
    model = onnx.load(str(shipped("resnet18").path))
    assert not model.functions and [o.domain for o in model.opset_import] == [""]
