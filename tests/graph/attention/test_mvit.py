"""Tests of MViT's positional encodings and shortcuts against the original."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from chain import noise, small_mvit
from torch import Tensor, nn
from torchvision.models.video import mvit

from qatkit.graph.nodes import op_class
from qatkit.graph.stub import stub
from qatkit.graph.trace import trace


def drawn(version: int) -> nn.Module:
    """Returns a small MViT with random parameters, so that losing any of them changes the output."""
    model = small_mvit(version).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_written_in_place_is_in_the_graph(version: int) -> None:
    """The positional encodings and shortcuts are in-place calls whose results are unused."""
    model, x = drawn(version), noise(2, 3, 4, 32, 32)
    torch.testing.assert_close(trace(model, x)(x), model(x), rtol=1e-5, atol=1e-6)
    result = stub(model, x)
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-5, atol=1e-6)
    kinds = {op_class(n) for n in result.graph.graph.nodes}
    assert not kinds & {"relative_positions", "shortcut"}


@pytest.mark.parametrize(
    ("queries", "keys"), [((2, 4, 4), (2, 4, 4)), ((2, 4, 6), (1, 2, 3)), ((1, 2, 2), (2, 4, 3))]
)
@pytest.mark.parametrize("length", [7, 5])
def test_the_twin_adds_the_relative_positions(
    queries: tuple[int, int, int], keys: tuple[int, int, int], length: int
) -> None:
    """Covers query grids as fine as the key grid, finer and coarser, and tables that must be interpolated."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h, self.w, self.t = (nn.Parameter(noise(length, 8, seed=i)) for i in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k = x[:, :, : 1 + count[0]], x[:, :, 1 + count[0] :]
            scores = torch.matmul(q, k.transpose(2, 3))
            return cast(Tensor, mvit._add_rel_pos(scores, q, queries, keys, self.h, self.w, self.t))

    count = [a * b * c for a, b, c in (queries, keys)]
    model, x = nn.Sequential(Scores()), noise(2, 3, sum(count) + 2, 8)
    result = stub(model, x)
    assert [where for where, _ in result.skipped] == ["0.relative"]  # its MatMuls stay float
    torch.testing.assert_close(result.graph(x), model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.graph(x[:1]), model(x[:1]), rtol=1e-5, atol=1e-5)
