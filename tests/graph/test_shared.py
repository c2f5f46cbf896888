"""Tests of modules that are called on inputs of very different ranges, from training to the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import calibrated, noise, ship
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.schema import OverrideConfig
from qatkit.graph.convert.integer_modules import Quantized
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.quantizers import fake_quantizers
from qatkit.quant.qat_layers import QATOperator

FAR = 100.0
SHAPES = {"linear": (12,), "conv": (4, 8, 8)}
OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(12, 12),
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1),
}


class Levels(nn.Module):
    """A head of two operators that is called on a tensor and on 100 times that tensor: two outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = OPERATORS[kind](), OPERATORS[kind]()

    def head(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.second(F.relu(self.first(x))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), self.head(x * FAR)


@pytest.mark.parametrize("kind", list(OPERATORS))
def test_every_call_has_its_own_ranges_and_bias_scale(kind: str) -> None:
    case = ship(Levels(kind).eval(), noise(64, *SHAPES[kind]), f"levels_{kind}")
    scales = {n: float(q.scale) for n, q in fake_quantizers(case.simulated).items()}
    for near, far in (("input", "mul"), ("first", "first_1")):
        assert scales[far] == pytest.approx(FAR * scales[near], rel=0.3)
    for name, source in (("first", "input"), ("first_1", "mul"), ("second_1", "first_1")):
        quantized = case.converted.get_submodule(name)
        assert isinstance(quantized, Quantized)
        assert torch.equal(quantized.bias_scale, quantized.weight_scale * scales[source])


@pytest.mark.parametrize("kind", list(OPERATORS))
def test_every_call_is_near_float_and_equals_the_file(kind: str) -> None:
    x = noise(64, *SHAPES[kind])
    case = ship(Levels(kind).eval(), x, f"levels_{kind}")
    with torch.no_grad():
        floats, simulated, converted = case.model(x), case.simulated(x), case.converted(x)
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    session = ort.InferenceSession(str(case.path), settings, providers=["CPUExecutionProvider"])
    for i, from_file in enumerate(session.run(None, {"input": x.numpy()})):
        width = float(floats[i].max() - floats[i].min())
        assert (floats[i] - converted[i]).abs().max() < 0.04 * width
        # A step is width / 255, so no value is off by a step.
        assert (simulated[i] - converted[i]).abs().max() < 1e-5 * width
        np.testing.assert_array_equal(from_file, converted[i].numpy())


def test_the_file_holds_a_shared_weight_once() -> None:
    case = ship(Levels("conv").eval(), noise(64, 4, 8, 8), "levels_once")
    shapes = [tuple(i.dims) for i in onnx.load(case.path).graph.initializer]
    assert shapes.count((4, 4, 3, 3)) == 2


def test_calls_share_their_parameters_in_training() -> None:
    model = Levels("linear")
    graph = calibrated(model.eval(), noise(32, 12)).train()
    assert len(list(graph.parameters())) == len(list(model.parameters()))
    graph(noise(4, 12))[1].sum().backward()  # only the call on the larger input
    assert all(p.grad is not None for p in graph.parameters())


@pytest.mark.parametrize(("left", "other"), [("first", "first_1"), ("first_1", "first")])
def test_one_call_left_in_float_leaves_the_other_alone(left: str, other: str) -> None:
    model, x = Levels("linear").eval(), noise(64, 12)
    case = ship(model, x, f"levels_{left}", overrides={left: OverrideConfig(float=True)})
    operators = {n: m for n, m in case.simulated.named_modules() if isinstance(m, QATOperator)}
    assert other in operators and left not in operators
    plain = case.converted.get_submodule(left)
    expected = model.get_parameter("first.weight")
    assert isinstance(plain, nn.Linear) and torch.equal(plain.weight, expected)
    with torch.no_grad():
        for wanted, found in zip(model(x), convert(case.simulated).graph(x), strict=True):
            assert (wanted - found).abs().max() < 0.04 * (wanted.max() - wanted.min())
