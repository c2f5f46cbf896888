"""Tests of products of two activations in number formats: operands have blocks along the summed axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
import torch.nn.functional as F
from chain import noise
from torch import Tensor, nn

from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.phase import set_phase
from qatkit.graph.quantizers import fake_quantizers
from qatkit.quant.backends import SIMULATED, SIMULATED_PRODUCTS, Backend
from qatkit.quant.formats.blocks import quantized
from qatkit.quant.formats.table import FORMATS
from qatkit.train.module import QATModule

FORMAT = FORMATS["mxfp4"]


class Attention(nn.Module):
    """A single attention head over 10 tokens of 40 channels, with unscaled scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        found: Tensor = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return found


class Squares(nn.Module):
    """A parameter times the square of a Linear's output, which is both operands of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(40, 40)
        self.mixed = nn.Parameter(noise(40, 40, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        found: Tensor = self.mixed @ (y @ y)
        return found


def last(x: Tensor) -> Tensor:
    """Rounds `x` in blocks along its last axis."""
    return quantized(x, FORMAT, FORMAT.granularity(-1), torch.ones(()))[0]


def columns(x: Tensor) -> Tensor:
    """Rounds `x` in blocks along its second to last axis."""
    return last(x.mT.contiguous()).mT


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(last(x), last(layer.weight), layer.bias)


def module_of(
    model: nn.Module,
    x: Tensor,
    dtype: str = "mxfp4",
    backend: Backend = SIMULATED_PRODUCTS,
    overrides: Mapping[str, OverrideConfig] | None = None,
) -> QATModule:
    activation, weight = (replace(one, dtype=dtype) for one in (backend.activation, backend.weight))
    backend = replace(backend, activation=activation, weight=weight)
    module = QATModule(model.eval(), x, backend=backend, overrides=overrides)
    module.calibrate([x])
    set_phase(module.graph, observe=False, quantize=True)
    return module.eval()


@torch.no_grad()
def test_operands_of_attention_are_rounded_along_the_sums(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Attention(), noise(3, 10, 40)
    module = module_of(model, x)
    q, k, v = (linear(layer, x) for layer in (model.q, model.k, model.v))
    scores = last(q) @ last(k).mT
    expected = last(torch.softmax(scores, -1)) @ columns(v)
    found = module.graph(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    export_onnx(module.convert().graph, x, tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"input": x.numpy()})[0], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_tensor_that_is_both_operands_has_two_roundings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Squares(), noise(2, 40, 40)
    module = module_of(model, x)
    y = linear(model.fc, x)
    square = last(y) @ columns(y)
    expected = last(model.mixed) @ columns(square)
    torch.testing.assert_close(module.graph(x), expected, rtol=1e-4, atol=1e-4)
    export_onnx(module.convert().graph, x, tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"input": x.numpy()})[0], expected, rtol=1e-4, atol=1e-4)


def test_each_tensor_of_a_contraction_has_a_range_of_its_own() -> None:
    torch.manual_seed(0)
    model, x = Squares(), noise(2, 40, 40)
    named = {
        name: one.scale.item()
        for name, one in fake_quantizers(module_of(model, x, "float8_e4m3fn").graph).items()
    }
    assert len(named) == 4 and len(set(named.values())) == 3  # the two roundings of y share a range


@torch.no_grad()
def test_products_stay_float_without_the_rule_or_by_override() -> None:
    torch.manual_seed(0)
    model, x = Attention(), noise(3, 10, 40)
    q, k, v = (linear(layer, x) for layer in (model.q, model.k, model.v))
    expected = torch.softmax(q @ k.mT, -1) @ v
    by_override = module_of(model, x, overrides={"op/matmul": OverrideConfig(float=True)})
    for module in (module_of(model, x, backend=SIMULATED), by_override):
        torch.testing.assert_close(module.graph(x), expected, rtol=1e-5, atol=1e-5)
