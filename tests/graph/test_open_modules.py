"""Tests of Bilinear and recurrent cells, which are rewritten as Linears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from chain import noise, run_ort, run_torch, ship
from torch import Tensor, nn

from qatkit.graph.fuse import fuse
from qatkit.quant.qat_layers import QATLinear
from qatkit.verify.audit import audit

LEAVES: dict[str, Callable[[], nn.Module]] = {
    "bilinear": lambda: nn.Bilinear(8, 8, 5),
    "bilinear_plain": lambda: nn.Bilinear(8, 8, 5, bias=False),
    "lstm": lambda: nn.LSTMCell(8, 8),
    "lstm_plain": lambda: nn.LSTMCell(8, 8, bias=False),
    "gru": lambda: nn.GRUCell(8, 8),
    "gru_plain": lambda: nn.GRUCell(8, 8, bias=False),
    "rnn": lambda: nn.RNNCell(8, 8),
    "rnn_relu": lambda: nn.RNNCell(8, 8, nonlinearity="relu"),
}


class Steps(nn.Module):
    """A Bilinear or a recurrent cell on [N, 3, 8]; the cell runs over 3 steps without an initial state."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leaf = make()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.leaf, nn.Bilinear):
            return cast(Tensor, self.leaf(x, x.flip(1)))
        state: Any = None
        for step in x.unbind(1):
            state = self.leaf(step, state)
        return torch.cat(state, -1) if isinstance(state, tuple) else cast(Tensor, state)


@pytest.mark.parametrize("name", list(LEAVES))
def test_opened_modules_compute_the_same_with_shared_parameters(name: str) -> None:
    model, x = Steps(LEAVES[name]), noise(4, 3, 8)
    graph = fuse(model, x).graph
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-6)
    graph(x).square().sum().backward()
    model(x).square().sum().backward()
    found = list(graph.parameters())
    assert len(found) == len(list(model.parameters()))
    for wanted in model.parameters():
        (same,) = [p for p in found if p.shape == wanted.shape and torch.equal(p, wanted)]
        torch.testing.assert_close(same.grad, wanted.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("bilinear", "lstm") else pytest.mark.slow) for n in LEAVES]
)
def test_its_products_run_in_int8(name: str) -> None:
    done = ship(Steps(LEAVES[name]).eval(), noise(16, 3, 8), f"opened_{name}")
    assert any(isinstance(module, QATLinear) for module in done.simulated.modules())
    wanted = run_torch(done.converted, done.images)
    np.testing.assert_allclose(run_ort(done.path, done.images, optimize=False), wanted, atol=3e-6)
    np.testing.assert_allclose(run_ort(done.path, done.images), wanted, atol=3e-6)
    exact = run_torch(done.model, done.images)
    assert np.square(wanted - exact).mean() < 2e-3 * np.square(exact).mean()
    found = audit(done.path)
    assert found.problems == () and found.int8_share > 0.85  # Bilinear also multiplies two activations
