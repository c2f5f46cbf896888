"""Checks that float16, bfloat16 and float64 models are quantized like the same model in float32."""

from __future__ import annotations

import pytest
import torch
from captures import noise_of
from torch import Tensor, nn

from qatkit.graph.phase import set_phase
from qatkit.graph.single_precision import in_single_precision
from qatkit.train.module import QATModule


class Casts(nn.Module):
    """A model that names its dtype in several ways."""

    def __init__(self, dtype: torch.dtype, method: str, old: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6).to(dtype), nn.Linear(6, 6).to(dtype)
        self.last = nn.Linear(6, 3)
        self.dtype, self.method, self.old = dtype, method, old

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.one(x.to(self.dtype)) + torch.ones(6, dtype=self.dtype)
        y = self.two(getattr(y.float(), self.method)())
        y = y.float().type(self.old) + y.type(self.dtype)
        result: Tensor = self.last(y.to(dtype=torch.float32)) * scale
        return result


KINDS = [
    (torch.float16, "half", "torch.HalfTensor"),
    (torch.bfloat16, "bfloat16", "torch.BFloat16Tensor"),
    (torch.float64, "double", "torch.DoubleTensor"),
]


@pytest.mark.parametrize(("dtype", "method", "old"), KINDS)
def test_a_model_of_another_type_becomes_one_of_float32(dtype: torch.dtype, method: str, old: str) -> None:
    model, x = Casts(dtype, method, old), noise_of(2, 6)
    expected = Casts(torch.float32, "float", "torch.FloatTensor")
    expected.load_state_dict(model.state_dict())
    module = QATModule(model, x).eval()
    set_phase(module.graph, observe=False, quantize=False)
    for given in (x, noise_of(5, 6, seed=1)):
        torch.testing.assert_close(module(given), expected(given), rtol=1e-5, atol=1e-6)
    assert model.one.weight.dtype is dtype
    assert any("float32" in reason for _, reason in module.notes)


def test_a_float32_model_is_itself() -> None:
    model = nn.Linear(3, 3)
    assert in_single_precision(model) == (model, [])
