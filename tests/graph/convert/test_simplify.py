"""Checks that dropping or precomputing operators for inference changes no value."""

from __future__ import annotations

import pytest
import torch
from chain import calibrated, noise
from torch import Tensor, nn
from torchvision.models.convnext import CNBlock

from qatkit.graph.convert.simplify import float_baseline
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.nodes import op_class


class Scaled(nn.Module):
    """A Linear whose output is multiplied by a γ of the given shape.

    If `twice`, the Linear also reads its own output, and the result is added.
    """

    def __init__(self, shape: tuple[int, ...], *, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.twice = nn.Linear(6, 6), twice
        self.gamma = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * self.gamma + self.fc(y) if self.twice else y * self.gamma


def block() -> CNBlock:
    """Returns ConvNeXt's block with a random layer scale of both signs."""
    torch.manual_seed(0)
    model = CNBlock(8, 1.0, 0.0).eval()
    nn.init.normal_(model.layer_scale)
    return model


def products(graph: torch.fx.GraphModule) -> int:
    return sum(op_class(node) == "mul" for node in graph.graph.nodes)


def test_a_layer_scale_goes_into_the_linear_before_it() -> None:
    model, x = block(), noise(2, 8, 5, 7)
    graph = float_baseline(model, x)
    assert products(graph) == 0
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x), block()(x), rtol=0, atol=0)  # the model itself is unchanged


def test_the_integers_of_a_scaled_linear_stay_what_they_were() -> None:
    model, x = block(), noise(4, 8, 5, 7)
    prepared = calibrated(model, x)
    converted = convert(prepared).graph
    assert products(prepared) == 1 and products(converted) == 0
    torch.testing.assert_close(converted(x), prepared(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model", [Scaled((2, 1)), Scaled((2, 6)), Scaled((6,), twice=True), Scaled((1,))],
    ids=["rows of the input", "everywhere", "read twice", "one number"],
)  # fmt: skip
def test_any_other_factor_stays(model: Scaled) -> None:
    x = noise(2, 6)
    graph = float_baseline(model.eval(), x)
    assert products(graph) == 1
    torch.testing.assert_close(graph(x), model(x), rtol=1e-6, atol=1e-6)


class Constants(nn.Module):
    """A model with constants that are not tensors: a device, a dtype, a size, and tuples of tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.table = nn.Linear(6, 4), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.table.unbind(0)
        count = self.table.shape[1]
        place = torch.arange(count, device=self.table.device, dtype=self.table.dtype)
        y = (self.fc(x) + place) * torch.stack(self.table.chunk(2)).sum((0, 1))
        z: Tensor = y.reshape(-1, count, 1) * first[:, None] + second.to(self.table.dtype)[:, None]
        return z


def test_constants_that_are_no_tensors_are_written_out_or_left() -> None:
    model, x = Constants().eval(), noise(3, 6)
    graph = float_baseline(model, x)
    torch.testing.assert_close(graph(x), model(x))
    kinds = {node.target for node in graph.graph.nodes if node.op in ("call_function", "call_method")}
    assert not kinds & {"unbind", "chunk", torch.arange, torch.stack, getattr}
