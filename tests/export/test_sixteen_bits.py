"""Tests of 16-bit integers: they follow QuantizeLinear's formula in simulation, converted module and file.

Operators on 16-bit tensors run in float.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import GatedSum, calibrated, noise, run_ort, run_torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.schema import Config, OverrideConfig
from qatkit.export.converted_reference import ConvertedReference
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.integer_modules import Quantized, QuantizeDequantize
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.nodes import module_of
from qatkit.quant.backends import FBGEMM, Backend
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.spec import QuantSpec
from qatkit.run.backend import backend_of
from qatkit.verify.audit import audit
from qatkit.verify.divergence import first_divergence
from qatkit_verify.errors import ConfigError

UINT16 = OverrideConfig(activation_dtype="uint16")
Array = NDArray[Any]


def _backend(activations: str = "uint16", weights: str | None = None) -> Backend:
    config = Config()
    config.backend.activation_dtype, config.backend.weight_dtype = activations, weights
    return backend_of(config)


def _rounded(x: Array, scale: float, zero: int, low: int, high: int) -> Array:
    """Returns clamp(round(x / scale) + zero, low, high) as integers."""
    return np.clip(np.rint(x / np.float32(scale)).astype(np.int64) + zero, low, high)


@pytest.mark.parametrize(("dtype", "opset"), [("uint16", 13), ("int16", 21)])
def test_every_integer_is_that_of_the_formula(tmp_path: Path, dtype: str, opset: int) -> None:
    kind = np.iinfo(dtype)
    scale, zero = 2.7 / 65535, int(kind.min) + 21000
    pair = QuantizeDequantize(torch.tensor(scale), torch.tensor(zero).to(getattr(torch, dtype)))
    x = torch.cat(
        [noise(1, 20000, seed=1), (torch.arange(0, 600) * 0.5 * scale)[None], torch.tensor([[9.0, -9.0]])], 1
    )
    whole = _rounded(x.numpy(), scale, zero, int(kind.min), int(kind.max))
    expected = (whole - zero).astype(np.float32) * np.float32(scale)
    assert whole.max() == kind.max and whole.min() == kind.min
    np.testing.assert_array_equal(pair(x).numpy(), expected)
    export_onnx(pair, x, tmp_path / "pair.onnx", opset=opset)
    nodes = onnx.load(tmp_path / "pair.onnx").graph.node
    assert {n.domain for n in nodes if n.op_type == "QuantizeLinear"} == {
        "com.microsoft" if opset < 21 else ""
    }
    session = ort.InferenceSession(str(tmp_path / "pair.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], expected)


@pytest.mark.parametrize(
    ("activations", "weights", "largest"),
    [("uint16", None, 127), ("int16", None, 127), ("uint16", "int4", 7), ("uint16", "int16", 32767)],
)
def test_the_file_computes_what_the_module_does(
    tmp_path: Path, activations: str, weights: str | None, largest: int
) -> None:
    graph = calibrated(GatedSum().eval(), noise(32, 3, 10, 10), _backend(activations, weights))
    converted, images = convert(graph).graph, noise(32, 3, 10, 10, seed=4)
    expected = run_torch(converted, images)
    pairs = [m for m in converted.modules() if isinstance(m, QuantizeDequantize)]
    assert len(pairs) >= 8 and {str(m.zero_point.dtype).removeprefix("torch.") for m in pairs} == {
        activations
    }
    assert max(int(m.weight.abs().max()) for m in converted.modules() if isinstance(m, Quantized)) == largest
    tolerance = 5e-5 * np.abs(expected).max()  # a value near a tie may differ by one 16-bit step
    np.testing.assert_allclose(run_torch(graph, images), expected, rtol=0, atol=tolerance)
    for opset in (13, 21) if activations == "uint16" and weights is None else (21,):
        export_onnx(converted, images[:2], tmp_path / "model.onnx", opset=opset)
        for optimize in (False, True):
            got = run_ort(tmp_path / "model.onnx", images, optimize=optimize)
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
    reference = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(None, {"input": images.numpy()})
    np.testing.assert_allclose(cast(list[Array], reference)[0], expected, rtol=0, atol=tolerance)


def test_a_linear_sums_integers_exactly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 40)).eval()
    converted = convert(calibrated(model, noise(64, 700), _backend(weights="int16"))).graph
    images = noise(64, 700, seed=4)
    pair = next(m for m in converted.modules() if isinstance(m, QuantizeDequantize))
    linear = next(m for m in converted.modules() if isinstance(m, Quantized))
    x = _rounded(images.numpy(), float(pair.scale), int(pair.zero_point), 0, 65535) - int(pair.zero_point)
    assert linear.bias is not None
    total = x @ linear.weight.numpy().astype(np.int64).T + linear.bias.numpy()
    assert np.abs(total).max() > 2**32
    scale = (linear.weight_scale * pair.scale).numpy()
    np.testing.assert_allclose(run_torch(converted, images), total.astype(np.float32) * scale, rtol=3e-7)


@pytest.mark.parametrize("site", ["stem", "op/add", "op/conv"])
def test_an_override_mixes_8_and_16_bits(tmp_path: Path, site: str) -> None:
    graph = calibrated(GatedSum().eval(), noise(32, 3, 10, 10), overrides={site: UINT16})
    converted, images = convert(graph).graph, noise(32, 3, 10, 10, seed=4)
    expected, path = run_torch(converted, images), tmp_path / "model.onnx"
    export_onnx(converted, images[:2], path)
    for optimize in (False, True):
        np.testing.assert_allclose(run_ort(path, images, optimize=optimize), expected, rtol=0, atol=1e-6)
    found = audit(path)
    wide = [node for node in found.nodes if "16-bit" in node.reason]
    assert found.ok and wide and all(node.precision == "float" for node in wide)
    assert {node.source for node in found.nodes if node.precision == "int8"}.isdisjoint(
        node.source for node in wide
    )
    assert 0 < found.int8_share <= 1


def test_no_operator_counts_as_int8(tmp_path: Path) -> None:
    graph = calibrated(GatedSum().eval(), noise(32, 3, 10, 10), _backend())
    export_onnx(convert(graph).graph, noise(2, 3, 10, 10), tmp_path / "model.onnx")
    found = audit(tmp_path / "model.onnx")
    assert found.ok and found.int8_share == 0 and found.macs > 0


def test_a_wrong_scale_is_found_and_a_tie_is_not(tmp_path: Path) -> None:
    graph = calibrated(GatedSum().eval(), noise(32, 3, 10, 10), _backend())
    converted, images, path = convert(graph).graph, noise(4, 3, 10, 10, seed=4), tmp_path / "model.onnx"
    export_onnx(converted, images[:2], path)
    file, reference = onnx.load(path), ConvertedReference(converted)
    recorded = reference.integers(images.numpy(), path)
    assert len(recorded) >= 8 and first_divergence(path, images.numpy(), recorded).first is None
    scale = next(one for one in file.graph.initializer if one.name == "inner.weight_scale")
    scale.CopyFrom(
        onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * np.float32(1.01), scale.name)
    )
    onnx.save(file, path)
    found = first_divergence(path, images.numpy(), recorded)
    assert found.operator == "inner/Conv"


def test_a_float_conv_between_pairs_keeps_its_weight(tmp_path: Path) -> None:
    """ONNX Runtime would silently run a Conv between a DequantizeLinear and a QuantizeLinear in int8."""
    overrides = {"inner": OverrideConfig(float=True)}
    graph = calibrated(GatedSum().eval(), noise(32, 3, 10, 10), _backend(), overrides)
    converted, images = convert(graph).graph, noise(32, 3, 10, 10, seed=4)
    expected, path = run_torch(converted, images), tmp_path / "model.onnx"
    export_onnx(converted, images[:2], path)
    np.testing.assert_allclose(run_ort(path, images), expected, rtol=0, atol=5e-5 * np.abs(expected).max())


def _classes(count: int) -> tuple[Tensor, Tensor]:
    """Returns noise around ten class centers as [count, 32], and the classes."""
    labels = torch.arange(count) % 10
    return 1.2 * noise(10, 32, seed=7)[labels] + noise(count, 32, seed=8), labels


def _with_outliers(factor: float) -> nn.Sequential:
    """Returns a net with two hidden channels multiplied by `factor`, and the next weights divided by it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    images, labels = _classes(2000)
    first, last = cast(nn.Linear, model[0]), cast(nn.Linear, model[2])
    with torch.no_grad():
        hidden = torch.relu(first(images))
        last.weight.copy_(torch.linalg.lstsq(hidden, F.one_hot(labels).float() - 0.1).solution.T)
        last.bias.zero_()
        first.weight[:2] *= factor
        first.bias[:2] *= factor
        last.weight[:, :2] /= factor
    return model


def _by_formula(model: nn.Sequential, images: Tensor, bits: int) -> Array:
    """Runs the float model with its inputs and hidden values rounded to `bits` by affine quantization."""
    x = images.numpy()
    for i, layer in enumerate(cast(list[nn.Linear], [model[0], model[2]])):
        low, high = min(0.0, float(x.min())), float(x.max())
        scale = (high - low) / (2**bits - 1)
        zero = round(-low / scale)
        x = ((_rounded(x, scale, zero, 0, 2**bits - 1) - zero) * scale).astype(np.float32)
        x = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
        x = np.maximum(x, 0) if i == 0 else x
    return x


def test_outliers_cost_8_bits_much_and_16_nothing(tmp_path: Path) -> None:
    model, (images, labels) = _with_outliers(300.0), _classes(1000)

    def top1(logits: Array) -> float:
        return 100 * float(np.mean(logits.argmax(1) == labels.numpy()))

    exact, found = top1(run_torch(model, images)), {}
    for name, backend in (("8", FBGEMM), ("16", _backend())):
        graph = calibrated(copy.deepcopy(model), images, backend)
        export_onnx(convert(graph).graph, images[:2], tmp_path / f"{name}.onnx")
        found[name] = top1(run_ort(tmp_path / f"{name}.onnx", images))
    formula = {bits: top1(_by_formula(model, images, bits)) for bits in (8, 16)}
    assert exact > 90 and formula[16] == exact
    assert abs(found["16"] - exact) <= 0.2  # the weights have 8 bits
    assert found["8"] < exact - 10 and abs(found["8"] - formula[8]) < 3


def test_16_bits_train() -> None:
    graph = calibrated(GatedSum().eval(), noise(32, 3, 10, 10), _backend("int16"))
    x = noise(4, 3, 10, 10, seed=5).requires_grad_()
    graph.train()
    graph(x).square().sum().backward()
    trained = [p for p in graph.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and bool(p.grad.isfinite().all()) for p in trained)
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)
    fakes = [module_of(n) for n in graph.graph.nodes if n.op == "call_module"]
    kinds = {fake.spec for fake in fakes if isinstance(fake, FakeQuantize)}
    assert kinds == {QuantSpec("int16")}


def test_other_runtimes_and_ends_of_bytes_are_refused() -> None:
    config = Config()
    config.backend.target, config.backend.activation_dtype = "qatkit.quant.backends.TENSORRT", "uint16"
    with pytest.raises(ConfigError, match=r"backend\.activation_dtype=uint16: expected null or uint8, int8"):
        backend_of(config)
    config.backend.activation_dtype = None
    config.backend.overrides = {"fc": OverrideConfig(weight_dtype="int16")}
    with pytest.raises(
        ConfigError, match=r"backend\.overrides\.fc\.weight_dtype=int16: expected null or uint8"
    ):
        backend_of(config)
