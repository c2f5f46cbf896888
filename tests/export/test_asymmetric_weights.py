"""Tests of weights with zero points: the file has the module's integers and gives its outputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from chain import SMALL, calibrated, noise, run_ort, run_torch, settle, ship, small_vit
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from tiny_run import digits_test, logits, tiny, top
from torch import Tensor, fx, nn

from qatkit.algorithms import AdaRound, Algorithm, BiasCorrection, MomentRounding, SequentialMSE
from qatkit.config.schema import OverrideConfig
from qatkit.export.converted_reference import ConvertedReference
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.integer_modules import Quantized
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.quantizers import clip_weights
from qatkit.jobs.pipeline import train
from qatkit.quant.backends import FBGEMM, Backend
from qatkit.quant.granularity import Granularity, PerChannel, PerTensor
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize
from qatkit.verify.parity import parity
from qatkit_verify.installed import version_numbers
from qatkit_verify.saturation import saturates_here

newer = pytest.mark.skipif(
    version_numbers(onnxruntime.__version__) < version_numbers("1.27"),
    reason="QLinearConv takes zero points that differ between channels from ONNX Runtime 1.27 on",
)


ROWS = PerChannel(0)


def weights(dtype: str, *, symmetric: bool = False, granularity: Granularity = ROWS) -> QuantSpec:
    """Returns a spec; int8 has 7 bits on CPUs that saturate sums of 8-bit products.

    No guard against saturation supports zero points.
    """
    return QuantSpec(dtype, symmetric, granularity, reduce_range=dtype == "int8" and saturates_here())


def backend(dtype: str = "int8") -> Backend:
    return replace(FBGEMM, weight=weights(dtype))


def uneven(model: nn.Module) -> nn.Module:
    """Moves the weights of each channel away from zero: up in one channel, down in the next."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.Embedding)):
            weight = module.weight.data
            signs = torch.tensor([1.0, -1.0]).repeat(len(weight))[: len(weight)]
            weight += weight.std() * 1.5 * signs.view(-1, *[1] * (weight.ndim - 1))
    return model


def small(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "vit":
        return uneven(small_vit()), noise(16, 3, 32, 32)
    kind, shape = SMALL[name]
    return settle(uneven(kind()), *shape), noise(16, *shape)


def quantized(graph: fx.GraphModule) -> dict[str, Quantized]:
    return {path: one for path, one in graph.named_modules() if isinstance(one, Quantized)}


EACH_TYPE = ("chain", "mlp")  # Convolutions and linear layers; the other networks consist of these.
# Libraries and CPUs round LayerNorm and Softmax differently, so values after them may be a step off.
BETWEEN = {"block": 0.01, "vit": 1.0}  # share of the values


@newer
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        if dtype == "int8" or name in EACH_TYPE
        else pytest.param(name, dtype, marks=pytest.mark.slow)
        for name in ("chain", "mlp", "residual", "gate", "block", "vit")
        for dtype in ("int8", "uint8", "int4", "uint4")
    ],
)
def test_module_and_runtime_agree(name: str, dtype: str) -> None:
    model, images = small(name)
    case = ship(model, images, f"{name}_{dtype}_asymmetric", backend(dtype))
    held = {one.name: numpy_helper.to_array(one) for one in onnx.load(case.path).graph.initializer}
    found = quantized(case.converted)
    assert found
    for path, one in found.items():
        zero = held[f"{path}.weight_zero_point"]
        assert len(np.unique(zero)) > 1 and zero.shape == one.weight_scale.shape
        np.testing.assert_array_equal(held[f"{path}.weight"], one.weight.numpy())
        np.testing.assert_array_equal(zero, one.weight_zero_point.numpy())
        spec = weights(dtype)
        assert (int(one.weight.min()), int(one.weight.max())) == (spec.quant_min, spec.quant_max)
    images = torch.cat([images, noise(*images.shape, seed=7)])
    exact, want = run_torch(case.model, images), run_torch(case.converted, images)
    made = [run_ort(case.path, images, optimize=optimize) for optimize in (False, True)]
    for got in (run_torch(case.simulated, images), *made):
        off = np.abs(got - want) / np.ptp(exact)
        assert off.max() < (0.02 if name in BETWEEN else 2e-5)
        assert (off > 2e-5).mean() <= BETWEEN.get(name, 0.0)
    if dtype in ("int8", "uint8"):
        assert np.abs(want - exact).mean() < 0.02 * np.ptp(exact)


@newer
def test_every_quantized_tensor_is_the_modules() -> None:
    model, images = small("residual")
    case = ship(model, images, "residual_parity", backend())
    found = parity(case.converted, case.path, [images], threads=1)
    for one in (found.unoptimized, found.optimized):
        assert one is not None and one.agreement == 1.0 and one.max_steps < 1e-3
    integers = ConvertedReference(case.converted).integers(images, case.path)
    model = onnx.load(case.path)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in integers)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for name, values in zip(integers, session.run(list(integers), {"input": images.numpy()}), strict=True):
        np.testing.assert_array_equal(integers[name], values)


@newer
def test_onnx_reference_evaluator_agrees() -> None:
    model, images = small("mlp")
    case = ship(model, images, "mlp_reference", backend(), opset=21)
    (got,) = ReferenceEvaluator(str(case.path)).run(None, {"input": images.numpy()})
    want = run_torch(case.converted, images)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=1e-5, atol=1e-6)


def test_one_zero_point_serves_a_whole_weight() -> None:
    """All versions of ONNX Runtime accept one zero point per weight; symmetric uint8 weights have 128."""
    model, images = small("chain")
    for name, spec in {
        "tensor": weights("int8", granularity=PerTensor()),
        "middle": weights("uint8", symmetric=True),
    }.items():
        case = ship(model, images, f"chain_{name}", replace(FBGEMM, weight=spec))
        zeros = [one.weight_zero_point for one in quantized(case.converted).values()]
        assert all(len(zero.unique()) == 1 for zero in zeros)
        want = run_torch(case.converted, images)
        for optimize in (False, True):
            np.testing.assert_allclose(run_ort(case.path, images, optimize=optimize), want, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_positive_weights_ship_with_less_error(dtype: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    model, weight = nn.Sequential(linear), linear.weight.data.abs_().add_(0.05).numpy()
    images, errors = noise(256, 64), {}
    for symmetric in (False, True):
        spec = weights(dtype, symmetric=symmetric)
        case = ship(model.eval(), images, f"positive_{dtype}_{symmetric}", replace(FBGEMM, weight=spec))
        np.testing.assert_allclose(run_ort(case.path, images), run_torch(case.converted, images), atol=1e-5)
        held = {one.name: numpy_helper.to_array(one) for one in onnx.load(case.path).graph.initializer}
        whole, scale, zero = (held[f"0.weight{tail}"] for tail in ("", "_scale", "_zero_point"))
        shipped = (whole.astype(np.float64) - zero[:, None]) * scale[:, None]
        errors[symmetric] = 10 * np.log10((weight**2).sum() / ((shipped - weight) ** 2).sum())
    assert errors[False] > errors[True] + 5


@newer
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_packed_weights_and_zero_points_are_the_modules(tmp_path: Path, dtype: str) -> None:
    model, images = small("residual")
    converted = convert(calibrated(model, images, backend(dtype))).graph
    export_onnx(converted, images[:2], tmp_path / "packed.onnx", opset=21, pack_int4=True)
    held = {one.name: one for one in onnx.load(tmp_path / "packed.onnx").graph.initializer}
    for path, one in quantized(converted).items():
        tensor = held[f"{path}.weight"]
        assert tensor.data_type == getattr(onnx.TensorProto, dtype.upper())
        np.testing.assert_array_equal(
            numpy_helper.to_array(tensor).astype(np.int16), one.weight.to(torch.int16)
        )
    for optimize in (False, True):
        got = run_ort(tmp_path / "packed.onnx", images, optimize=optimize)
        np.testing.assert_allclose(got, run_torch(converted, images), atol=1e-5)


class Recurrent(nn.Module):
    """An Embedding, an LSTM and a GRU over [N, 5] tokens, and a Linear that shares the table's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        for one in (*self.lstm.parameters(), *self.gru.parameters()):
            if one.ndim == 2:
                one.data.add_(0.2)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.gru(self.lstm(self.table(tokens))[0])[0]
        return cast(Tensor, self.head(x[:, -1]))


def test_tables_and_recurrent_weights_have_zero_points(tmp_path: Path) -> None:
    model = uneven(Recurrent()).eval()
    tokens = torch.randint(0, 16, (8, 5), generator=torch.Generator().manual_seed(0))
    converted = convert(calibrated(model, tokens, backend())).graph
    export_onnx(converted, tokens[:2], tmp_path / "model.onnx")
    held = {one.name: one for one in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert any(name.endswith("_hh_l0_zero_point") for name in held)
    assert len(np.unique(numpy_helper.to_array(held["table.weight_zero_point"]))) > 1
    want, exact = run_torch(converted, tokens), run_torch(model, tokens)
    assert np.abs(want - exact).max() < 0.03 * np.ptp(exact)
    for optimize in (False, True):
        session = onnxruntime.SessionOptions()
        levels = onnxruntime.GraphOptimizationLevel
        session.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        run = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), session)
        (got,) = run.run(None, {run.get_inputs()[0].name: tokens.numpy()})
        np.testing.assert_allclose(got, want, atol=1e-5 * float(np.ptp(exact)))


@newer
@pytest.mark.parametrize(
    "algorithm",
    [MomentRounding(), AdaRound(steps=50), SequentialMSE(), BiasCorrection()],
    ids=lambda one: type(one).__name__,
)
def test_what_algorithms_find_ships(tmp_path: Path, algorithm: Algorithm) -> None:
    """Each algorithm has less output error than rounding to nearest; the file gives the module's outputs."""
    model, images = small("residual")
    shifted = backend("int4")
    plain = convert(calibrated(model, images, shifted)).graph
    graph = calibrated(model, images, shifted)
    algorithm(graph, [images])
    converted = convert(graph).graph
    export_onnx(converted, images[:2], tmp_path / "model.onnx")
    want, exact = run_torch(converted, images), run_torch(model, images)
    errors = [float(((one - exact) ** 2).mean()) for one in (want, run_torch(plain, images))]
    assert errors[0] < errors[1]
    for optimize in (False, True):
        np.testing.assert_allclose(
            run_ort(tmp_path / "model.onnx", images, optimize=optimize),
            want,
            atol=1e-5 * float(np.ptp(exact)),
        )


@newer
def test_ranges_of_least_error_ship(tmp_path: Path) -> None:
    model, images = small("residual")
    graph = calibrated(model, images, backend("uint4"))
    clip_weights(graph, 16)
    clips = [one.clip for one in graph.modules() if isinstance(one, WeightFakeQuantize)]
    assert any(bool((one < 1).any()) for one in clips)
    converted = convert(graph).graph
    export_onnx(converted, images[:2], tmp_path / "model.onnx")
    want = run_torch(converted, images)
    np.testing.assert_allclose(run_ort(tmp_path / "model.onnx", images), want, atol=1e-5)
    np.testing.assert_allclose(run_torch(graph, images), want, atol=1e-4 * float(np.ptp(want)))


@newer
def test_sums_beyond_float32_are_those_of_the_runtime() -> None:
    """Sums of 2,000 products with weights of up to 255 steps are too large to be exact in float32."""
    torch.manual_seed(0)
    first = nn.Linear(2000, 4)
    first.weight.data.uniform_(0.9, 1.0)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(4, 3))
    images = torch.rand(64, 2000, generator=torch.Generator().manual_seed(0)) + 1
    case = ship(model.eval(), images, "large_sums", backend("uint8"))
    np.testing.assert_array_equal(run_torch(case.converted, images), run_ort(case.path, images))


def test_an_override_keeps_other_bits() -> None:
    model, images = small("chain")
    overrides = {"conv1": OverrideConfig(weight_dtype="int8", reduce_range=True)}
    case = ship(model, images, "chain_override", backend("int4"), overrides)
    found = quantized(case.converted)
    assert [one.dtype for one in found.values()] == ["int8", "int4", "int4"]
    assert (int(found["conv1"].weight.min()), int(found["conv1"].weight.max())) == (-64, 63)


INT8 = backend()


@newer
def test_a_run_with_a_users_backend_trains_and_ships(tmp_path: Path) -> None:
    """The BatchNorm is trained, and integers are frozen while the range of their weight still changes."""
    config = tiny(tmp_path)
    config.backend.target, config.backend.reduce_range = f"{__name__}.INT8", saturates_here()
    config.schedule.batch_norm, config.schedule.oscillation, config.schedule.epochs = "train", "freeze", 2
    assert train(config) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["accuracy"]["int8"]["top1"] == report["accuracy"]["simulated"]["top1"] > 85
    assert report["parity"]["optimized"]["max_steps"] < 1e-3
    images, labels = digits_test()  # one bit may round a pixel at a tie the other way
    found = top(logits(tmp_path / "model.int8.onnx", images), labels, 1)
    assert found == pytest.approx(report["accuracy"]["int8"]["top1"], abs=0.6)
    held = {one.name: one for one in onnx.load(tmp_path / "model.int8.onnx").graph.initializer}
    assert numpy_helper.to_array(held["conv2.weight_zero_point"]).any()
