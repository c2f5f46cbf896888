"""Tests of the arithmetic of converted modules, against ONNX Runtime's kernels and weights folded by hand."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import Chain, noise, run_ort, run_torch, settle, ship, shipped
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from qatkit.config.schema import OverrideConfig
from qatkit.graph.convert import to_integers as converting
from qatkit.graph.convert.integer_modules import Quantized, QuantizedAdd, QuantizedHardSigmoid, QuantizedMul
from qatkit.quant.pairs import least_scale
from qatkit.verify.audit import audit

Pair = tuple[Tensor, Tensor]  # scale, zero_point

x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"),
    reason="the arithmetic of ONNX Runtime's x86 kernels is modelled; ARM's Add is fixed point",
)


def _session(
    operator: str, dtype: str, shapes: list[list[int]], pairs: list[Pair], read: float, folder: Path
) -> ort.InferenceSession:
    """Returns a session of DQ(a), DQ(b) → operator → Q(pairs[2]), which run as one int8 kernel, and a DQ.

    The last DQ has the scale `read`. If the second shape is [], b is a constant, the dtype's largest integer.
    """
    info, kind = torch.iinfo(getattr(torch, dtype)), getattr(TensorProto, dtype.upper())
    constants = [numpy_helper.from_array(np.array(read, np.float32), "read")]
    for i, (scale, zero) in enumerate(pairs):
        constants.append(numpy_helper.from_array(scale.numpy().astype(np.float32), f"s{i}"))
        constants.append(numpy_helper.from_array(zero.numpy().astype(dtype), f"z{i}"))
    if not shapes[1]:
        constants.append(numpy_helper.from_array(np.array(info.max, dtype), "b"))
    inputs = [helper.make_tensor_value_info(n, kind, s) for n, s in zip(("a", "b"), shapes, strict=True) if s]
    nodes = [
        helper.make_node("DequantizeLinear", ["a", "s0", "z0"], ["fa"]),
        helper.make_node("DequantizeLinear", ["b", "s1", "z1"], ["fb"]),
        helper.make_node(operator, ["fa", "fb"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "s2", "z2"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "read", "z2"], ["y"]),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, shapes[0])
    graph = helper.make_graph(nodes, "pair", inputs, [output], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.add_session_config_entry("session.qdqisint8allowed", "1")  # ONNX Runtime's default on ARM
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert f"QLinear{operator}" in [n.op_type for n in onnx.load(options.optimized_model_filepath).graph.node]
    return session


def _random_pair(rng: np.random.Generator, dtype: str) -> Pair:
    info = torch.iinfo(getattr(torch, dtype))
    zero = info.min if rng.random() < 0.3 else int(rng.integers(info.min, info.max + 1))  # 30 %: after a ReLU
    return torch.tensor(10 ** rng.uniform(-3, 0), dtype=torch.float32), torch.tensor(zero)


@x86
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(("operator", "kind"), [("Add", QuantizedAdd), ("Mul", QuantizedMul)])
def test_pairs_equal_the_kernel_on_all_pairs_of_bytes(
    operator: str, kind: type[QuantizedAdd] | type[QuantizedMul], dtype: str, tmp_path: Path
) -> None:
    info = torch.iinfo(getattr(torch, dtype))
    integers = torch.arange(info.min, info.max + 1)
    a, b = (t.contiguous() for t in torch.meshgrid(integers, integers, indexing="ij"))
    distinct = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        (s_a, z_a), (s_b, z_b), (_, z_c) = pairs = [_random_pair(rng, dtype) for _ in range(3)]
        # The scale roughly covers the range of the results, so that most of them are not clipped.
        s_c = (s_a + s_b if operator == "Add" else 100 * s_a * s_b) * (0.3 + seed / 20)
        pairs[2] = (s_c, z_c)
        session = _session(operator, dtype, [[256, 256]] * 2, pairs, float(s_c), tmp_path)
        kernel = session.run(None, {"a": a.numpy().astype(dtype), "b": b.numpy().astype(dtype)})[0]
        expected = np.rint(kernel / s_c.numpy())
        found = torch.round(kind(pairs)((a - z_a) * s_a, (b - z_b) * s_b) / s_c)
        found = found.clamp(int(info.min - z_c), int(info.max - z_c))  # the quantization after it clamps
        assert int((found.numpy() != expected).sum()) == 0, f"parameters {seed}"
        distinct += len(np.unique(expected))
    assert distinct > 20 * 64


@x86
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("other", [[2, 24, 90, 90], [2, 24, 1, 1], []])
def test_large_pairs_equal_the_kernel_in_any_shape(
    other: list[int], layout: torch.memory_format, tmp_path: Path
) -> None:
    """Tensors of more than 2**18 values are computed in chunks."""
    rng, shape = np.random.default_rng(0), [2, 24, 90, 90]
    pairs = [(torch.tensor(scale), torch.tensor(zero)) for scale, zero in ((0.1, 3), (0.2, 100), (0.17, 90))]
    a = rng.integers(0, 256, shape, dtype=np.uint8)
    b = rng.integers(0, 256, other, dtype=np.uint8) if other else np.array(255, np.uint8)
    session = _session("Add", "uint8", [shape, other], pairs, 0.17, tmp_path)
    expected = session.run(None, {"a": a, "b": b} if other else {"a": a})[0]
    x, y = (
        (torch.from_numpy(q).float() - zero) * scale for q, (scale, zero) in zip((a, b), pairs, strict=False)
    )
    x = x.contiguous(memory_format=layout)
    # ONNX Runtime's kernel expects a constant scalar first.
    read = QuantizedAdd(pairs)(x, y) if other else QuantizedAdd([pairs[1], pairs[0], pairs[2]])(y, x)
    steps = torch.round(read / 0.17).clamp(0 - 90, 255 - 90)
    np.testing.assert_array_equal(steps.numpy(), np.rint(expected / 0.17))


@x86
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_hard_sigmoid_equals_the_kernel_on_all_bytes(dtype: str, tmp_path: Path) -> None:
    info = torch.iinfo(getattr(torch, dtype))
    x, zero = torch.arange(info.min, info.max + 1), torch.tensor(info.min, dtype=getattr(torch, dtype))
    for seed in range(40):
        pair = _random_pair(np.random.default_rng(seed), dtype)
        module = QuantizedHardSigmoid(pair, torch.tensor(1 / 255), zero)
        pairs = [pair, (module.three_scale, module.three_zero_point), (module.sum_scale, zero)]
        session = _session("Add", dtype, [[256], []], pairs, float(module.scale), tmp_path)
        values = (x - pair[1]) * pair[0]
        found = module(values)
        np.testing.assert_array_equal(found.numpy(), session.run(None, {"a": x.numpy().astype(dtype)})[0])
        assert (found - torch.nn.functional.hardsigmoid(values)).abs().max() < 0.501 / 255


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "vit"])
def test_networks_are_close_without_optimizations(name: str) -> None:
    """Float kernels round about one result in 10⁵ the other way.

    In MobileNetV2 with random weights, one such step grows to about 8 output steps. There, at least one
    image must agree, and the mean difference must stay far below the quantization error.
    """
    images, network = noise(8, *shipped(name).images.shape[1:], seed=5), shipped(name)
    converted, reference = run_torch(network.converted, images), run_torch(network.model, images)
    step = np.ptp(reference) / 255
    apart = np.abs(converted - run_ort(network.path, images, optimize=False)).mean(1) / step
    if name == "mobilenet_v2":
        assert apart.min() < 1e-3
        assert apart.mean() < 0.3 * np.abs(converted - reference).mean() / step
    else:
        assert apart.mean() <= 1


def test_weights_and_biases_are_those_of_the_folded_convolutions() -> None:
    network = shipped("chain")
    model, converted = network.model, network.converted
    assert isinstance(model, Chain)
    folded: list[tuple[str, nn.Conv2d, nn.BatchNorm2d | None]] = [
        ("conv1", model.conv1, model.bn1), ("conv2", model.conv2, model.bn2), ("conv3", model.conv3, None)
    ]  # fmt: skip
    for path, conv, norm in folded:
        weight = conv.weight.detach().double().numpy()
        bias = np.zeros(len(weight)) if conv.bias is None else conv.bias.detach().double().numpy()
        if norm is not None:
            state = {name: value.double().numpy() for name, value in norm.state_dict().items()}
            factor = state["weight"] / np.sqrt(state["running_var"] + norm.eps)
            weight = weight * factor[:, None, None, None]
            bias = (bias - state["running_mean"]) * factor + state["bias"]
        found = converted.get_submodule(path)
        assert isinstance(found, Quantized) and found.bias is not None
        scale = found.weight_scale.double().numpy()
        pairs = least_scale(torch.from_numpy(weight), per_channel=True).numpy()
        excess = scale / np.maximum(np.abs(weight).max(axis=(1, 2, 3)) / 127, pairs)
        assert ((excess > 1 - 1e-5) & (excess < 1.01)).all()  # alignment raises scales by up to 1 %
        steps = bias / (scale * float(found.input_scale))
        assert np.abs(found.weight.numpy() - weight / scale[:, None, None, None]).max() < 0.501
        assert np.abs(found.bias.numpy() - steps).max() < 0.5 + 1e-5 * np.abs(steps).max()


@pytest.mark.parametrize("barrier", [True, False])
def test_onnx_runtime_quantizes_a_float_conv_without_the_barrier(
    barrier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a barrier after it, ONNX Runtime runs the float convolution in int8; the audit must say so."""
    if not barrier:
        monkeypatch.setattr(converting, "_would_be_fused", lambda node: False)
    torch.manual_seed(0)
    model, images = settle(Chain(), 3, 12, 12), noise(16, 3, 12, 12)
    network = ship(model, images, f"barrier_{barrier}", overrides={"conv2": OverrideConfig(float=True)})
    found = audit(network.path, allow_float=["conv2"])
    kinds = {str(n.source): n.precision for n in found.nodes if n.macs}
    middle = "float" if barrier else "int8"
    assert kinds == {"conv1/Conv": "int8", "conv2/Conv": middle, "conv3/Conv": "int8"}
    assert found.ok == barrier


@x86
def test_a_near_dead_channel_beside_live_ones_keeps_its_bias() -> None:
    torch.manual_seed(0)
    model, images = settle(Chain(), 3, 12, 12), noise(16, 3, 12, 12)
    assert isinstance(model, Chain) and model.conv3.bias is not None
    with torch.no_grad():
        model.conv3.weight[1] = 1e-9
        model.conv3.bias[1] = 1.5
    network = ship(model, images, "near_dead")
    assert [place for place, _ in network.conversion.skipped] == ["conv3"]
    expected, found = run_torch(model, images), run_ort(network.path, images)
    step = np.ptp(expected) / 255
    assert np.abs(found[:, 1] - 1.5).max() < step
    assert np.abs(found - expected).mean() < 2 * step
    np.testing.assert_array_equal(run_torch(network.converted, images), found)
