"""Checks that float operators between int8 ones stay float, and are fused as in a float model."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from chain import noise, run_ort, run_torch, ship, steps_off
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.schema import OverrideConfig
from qatkit.quant.qat_layers import QATOperator
from qatkit.verify.audit import audit


@pytest.mark.parametrize(
    "middle",
    [
        [],
        [nn.ReLU()],
        [nn.MaxPool2d(2)],
        [nn.ReLU(), nn.MaxPool2d(2)],
        [nn.Flatten(2), nn.Unflatten(2, (6, 6))],
    ],
    ids=["nothing", "relu", "pool", "relu and pool", "reshapes"],
)
def test_a_float_conv_between_int8_convs_stays_float(middle: list[nn.Module]) -> None:
    """Unless prevented, ONNX Runtime quantizes the weight of the float Conv itself, per tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), *middle, nn.Conv2d(8, 4, 3)).eval()
    x = noise(16, 3, 10, 10)
    case = ship(model, x, "float_middle", overrides={"1": OverrideConfig(float=True)})
    convs = {n.source: n.precision for n in audit(case.path, allow_float=["1"]).nodes if "Conv" in n.op}
    assert convs == {"0/Conv": "int8", "1/Conv": "float", f"{len(model) - 1}/Conv": "int8"}
    assert audit(case.path, allow_float=["1"]).problems == ()
    assert steps_off(run_torch(case.converted, x), run_ort(case.path, x)) <= 1.2
    assert isinstance(case.converted.get_submodule("1"), nn.Conv2d)
    assert not isinstance(case.converted.get_submodule("1"), QATOperator)


def test_a_float_head_behind_a_relu_keeps_the_prior_linear_int8() -> None:
    """Unless prevented, ONNX Runtime fuses the int8 Gemm with the float ReLU into a float operator."""
    torch.manual_seed(0)
    x = noise(16, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)).eval()
    case = ship(model, x, "float_head", overrides={"2": OverrideConfig(float=True)})
    found = audit(case.path, allow_float=["2"])
    assert {n.source: n.precision for n in found.nodes if "Gemm" in n.op} == {
        "0/Gemm": "int8",
        "2/Gemm": "float",
    }
    assert found.problems == ()


class ConvNext(nn.Module):
    """A ConvNeXt block: an int8 conv, a Transpose, a float LayerNorm, an MLP with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.dw = nn.Conv2d(3, 16, 2, stride=2), nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm, self.fc1, self.act, self.fc2 = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.fc2(self.act(self.fc1(self.norm(self.dw(x).permute(0, 2, 3, 1)))))
        return x + cast(Tensor, y).permute(0, 3, 1, 2)


class ConvGelu(nn.Module):
    """A GELU directly after an int8 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv2(F.gelu(self.conv1(x))))


@pytest.mark.parametrize(
    ("kind", "fused"), [(ConvNext, {"LayerNormalization", "Gelu"}), (ConvGelu, {"Gelu"})]
)
def test_float_fusions_behind_int8_operators(kind: type[nn.Module], fused: set[str]) -> None:
    """A DequantizeLinear or Transpose directly before LayerNorm or GELU would prevent their fusion."""
    torch.manual_seed(0)
    x = noise(16, 3, 16, 16)
    case = ship(kind().eval(), x, "fusions")
    found = audit(case.path)
    assert {n.op for n in found.nodes if n.precision == "float"} & {
        "LayerNormalization",
        "Gelu",
        "Erf",
        "Sub",
    } == fused
    assert found.problems == ()
    assert steps_off(run_torch(case.converted, x), run_ort(case.path, x)) <= 1.2
