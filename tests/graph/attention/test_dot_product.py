"""Tests of decomposing scaled dot-product attention: equal results, or a reason why it stays float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from chain import noise, run_ort, run_torch, ship
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.nodes import op_class
from qatkit.graph.stub import stub
from qatkit.graph.trace import trace
from qatkit.quant.qat_layers import QATOperator

Attend = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """A user's attention on [N, 6, 16], with two heads of 8 channels."""

    mask: Tensor

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj, self.attend = nn.Linear(16, 48), nn.Linear(16, 16), attend
        self.register_buffer("mask", noise(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(-1, 6, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = self.attend(self, q, k, v)
        return cast(Tensor, self.proj(y.transpose(1, 2).reshape(-1, 6, 16)))


def _functions(graph: fx.GraphModule) -> list[str]:
    return [op_class(n) for n in graph.graph.nodes if n.op == "call_function"]


OPEN: dict[str, Attend] = {
    "plain": lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v),
    "scale": lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.1),
    "mask": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m.mask),
    "dropout": lambda m, q, k, v: F.scaled_dot_product_attention(
        q, k, v, dropout_p=0.5 if m.training else 0.0
    ),
    "causal": lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "causal, more keys": lambda _, q, k, v: F.scaled_dot_product_attention(
        q[:, :, :4], k, v, is_causal=True
    ).repeat(1, 1, 2, 1)[:, :, :6],
    "boolean": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.mask > -1),
    "nothing to see": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.mask > 0.9),
    "shared keys": lambda _, q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
}


@pytest.mark.parametrize("name", list(OPEN))
def test_what_is_opened_equals_the_function(name: str) -> None:
    model, x = Attention(OPEN[name]).eval(), noise(4, 6, 16)
    result = stub(trace(model, x), x)
    assert result.skipped == [] and "dot_product_attention" not in _functions(result.graph)
    torch.testing.assert_close(result.graph.eval()(x), model(x), rtol=0, atol=1e-6)


def test_dropout_is_alive_in_training_only() -> None:
    x = noise(4, 6, 16)
    graph = stub(trace(Attention(OPEN["dropout"]).train(), x), x).graph.train()
    assert not torch.equal(graph(x), graph(x))
    graph.eval()
    torch.testing.assert_close(graph(x), Attention(OPEN["plain"])(x), rtol=0, atol=1e-6)


def test_what_stays_closed_says_why() -> None:
    """Attention with a computed scale is not decomposed."""
    attend: Any = lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, scale=cast(Any, m.mask.sum()))  # noqa: E731
    result = stub(fx.symbolic_trace(Attention(attend).eval()), noise(4, 6, 16))
    assert [r for _, r in result.skipped] == ["attention stays float: its dropout or scale is computed"]


def test_the_file_is_near_float() -> None:
    model, x = Attention(OPEN["mask"]).eval(), noise(64, 6, 16)
    case = ship(model, x, "dot_product")
    inside = {n for n, m in case.simulated.named_modules() if isinstance(m, QATOperator)}
    assert inside == {"qkv", "proj"}
    expected, found = run_torch(model, x), run_torch(case.converted, x)
    assert abs(expected - found).max() < 0.05 * (expected.max() - expected.min())
    assert abs(run_ort(case.path, x) - found).max() < 0.02 * (found.max() - found.min())
