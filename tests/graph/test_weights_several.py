"""Tests of einsums of several operands, some of them weights: they become Linears and a product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captures import noise_of
from torch import Tensor, nn

from qatkit.graph.fuse import fuse

CASES: dict[str, tuple[str, str, tuple[tuple[int, ...], ...]]] = {
    "bilinear": ("bi,ijk,bj->bk", "xwy", ((6, 4, 7),)),
    "weight last": ("bj,bi,kij->bk", "yxw", ((7, 6, 4),)),
    "two weights": ("bi,ir,ro,bo->bo", "xwvz", ((6, 3), (3, 5))),
    "low rank alone": ("bi,ir,ro->bo", "xwv", ((6, 3), (3, 5))),
}
INPUTS = {"x": (2, 6), "y": (2, 4), "z": (2, 5)}


class Product(nn.Module):
    """An einsum of some of the inputs x, y, z and weights w, v, followed by a Linear."""

    def __init__(self, equation: str, order: str, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.equation, self.order = equation, order
        for name, shape in zip("".join(c for c in order if c in "wv"), shapes, strict=True):
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.last = nn.Linear(7 if "k" in equation else 5, 2)

    def forward(self, *inputs: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip([c for c in sorted(self.order) if c in INPUTS], inputs, strict=True))
        y: Tensor = self.last(
            torch.einsum(self.equation, *(given.get(c, getattr(self, c, None)) for c in self.order))
        )
        return y


@pytest.mark.parametrize("name", CASES)
def test_the_product_with_the_weight_is_an_operator(name: str) -> None:
    equation, order, shapes = CASES[name]
    model = Product(equation, order, shapes)
    inputs = tuple(
        noise_of(*INPUTS[c], seed=i) for i, c in enumerate(c for c in sorted(order) if c in INPUTS)
    )
    result = fuse(model, inputs)
    torch.testing.assert_close(result.graph(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
    linears = [m for m in result.graph.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 2
    assert not result.skipped
    result.graph(*inputs).sum().backward()
    assert all(p.grad is not None for p in result.graph.parameters())
