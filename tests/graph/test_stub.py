"""Tests of the replacements of attention and other modules: results, gradients and parameter names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from chain import noise, run_ort, run_torch, small_vit
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.fuse import fuse
from qatkit.graph.nodes import op_class
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM


class Attend(nn.Module):
    """A Linear and an attention that is called in one of several ways."""

    def __init__(self, call: str = "plain", **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"batch_first": True} | kwargs
        self.attn = nn.MultiheadAttention(24, options.pop("heads", 4), **options)
        self.fc, self.call = nn.Linear(24, 24), call
        for name, parameter in self.attn.named_parameters():
            nn.init.normal_(parameter, std=0.3) if "bias" in name else nn.init.normal_(parameter, std=0.2)
        self.register_buffer("mask", torch.triu(torch.ones(5, 5, dtype=torch.bool), 1))

    def forward(self, x: Tensor) -> Tensor:
        return CALLS[self.call](self, self.fc(x))


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda m, x: m.attn(x, x, x, need_weights=False)[0],
    "unread weights": lambda m, x: m.attn(x, x, x)[0],
    "keywords": lambda m, x: m.attn(value=x, key=x, query=x)[0],
    "positional": lambda m, x: m.attn(x, x, x, None, False)[0],
    "mask": lambda m, x: m.attn(x, x, x, attn_mask=m.mask, need_weights=False)[0],
    "positional mask": lambda m, x: m.attn(x, x, x, None, False, m.mask)[0],
    "weights": lambda m, x: m.attn(x, x, x)[1],
    "cross": lambda m, x: m.attn(x, x * 2, x, need_weights=False)[0],
    "widths": lambda m, x: m.attn(x, x[..., :12], x, need_weights=False)[0],
    "twice": lambda m, x: m.attn(*[m.attn(x, x, x)[0]] * 3)[0],
}


def _of_the_original(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state with the original names `in_proj_weight` and `in_proj_bias` for those of `qkv`."""
    return {name.replace(".qkv.", ".in_proj_"): value for name, value in state.items()}


def attentions(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]


@pytest.mark.parametrize("call", ["plain", "positional"])
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": False}, {"bias": False}, {"heads": 1}, {"heads": 12}, {"dropout": 0.4}]
)
def test_the_twin_is_the_attention(options: dict[str, Any], call: str) -> None:
    model, x = Attend(call, **options).eval(), noise(3, 5, 24)
    result = stub(model, x)
    assert (result.changed, result.skipped, attentions(result.graph)) == (1, [], [])
    x_mine, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = result.graph(x_mine), model(x_theirs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    upstream = noise(*expected.shape, seed=2)
    got.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(x_mine.grad, x_theirs.grad, rtol=1e-4, atol=1e-4)
    grads = {n: cast(Tensor, p.grad) for n, p in result.graph.named_parameters()}
    assert all(g is not None for g in grads.values())
    grads = _of_the_original(grads)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_dropout_of_the_twin_is_alive_in_training_only() -> None:
    x = noise(3, 5, 24)
    graph = stub(Attend(dropout=0.5).eval(), x).graph
    assert torch.equal(graph(x), graph(x))
    graph.train()
    assert not torch.equal(graph(x), graph(x))


WRITTEN_OUT: dict[str, Attend] = {
    "mask": Attend("mask"),
    "positional mask": Attend("positional mask"),
    "weights": Attend("weights"),
    "unread weights": Attend("unread weights"),
    "keywords": Attend("keywords"),
    "cross": Attend("cross"),
    "twice": Attend("twice"),
    "add_zero_attn": Attend(add_zero_attn=True),
    "add_bias_kv": Attend(add_bias_kv=True),
    "widths": Attend("widths", kdim=12),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_other_attention_is_written_out_and_runs(name: str) -> None:
    model, x = WRITTEN_OUT[name].eval(), noise(3, 5, 24)
    expected = model(x)
    result = stub(model, x)
    assert result.skipped == []
    assert not any(n.op == "call_module" and n.target == "attn" for n in result.graph.graph.nodes)
    torch.testing.assert_close(result.graph(x), expected, rtol=1e-5, atol=1e-5)
    graph = prepare_qat(result.graph, FBGEMM, x).graph
    torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)


def test_the_vit_keeps_its_output_and_its_names() -> None:
    model, x = small_vit(), noise(2, 3, 32, 32)
    expected, state = model(x), model.state_dict()
    graph = stub(model, x).graph
    torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)
    back = _of_the_original(graph.state_dict())
    assert sorted(back) == sorted(state)
    assert all(torch.equal(back[k], v) for k, v in state.items())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_a_checkpoint_of_the_original_loads_into_the_graph() -> None:
    other, x = small_vit(), noise(2, 3, 32, 32)
    graph = stub(small_vit(), x).graph
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    graph.load_state_dict({name.replace(".in_proj_", ".qkv."): v for name, v in other.state_dict().items()})
    torch.testing.assert_close(graph(x), other(x), rtol=1e-5, atol=1e-5)


class Function(nn.Module):
    """A model that calls one function, by position or by keyword."""

    def __init__(self, function: Any, keyword: bool = False) -> None:
        super().__init__()
        self.function, self.keyword = function, keyword

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.function(input=x) if self.keyword else self.function(x))


GATED: dict[str, tuple[nn.Module, list[str]]] = {
    "hardswish": (nn.Sequential(nn.Hardswish(inplace=True)), ["0.gate", "0.mul"]),
    "F.hardswish": (Function(F.hardswish), ["hardswish.gate", "hardswish.mul"]),
    "F.hardswish by keyword": (Function(F.hardswish, keyword=True), ["hardswish.gate", "hardswish.mul"]),
    "module by keyword": (Function(nn.Hardswish(), keyword=True), ["function.gate", "function.mul"]),
}


@pytest.mark.parametrize("name", GATED)
def test_gated_activations_are_opened(name: str) -> None:
    model, sites = GATED[name]
    x = torch.linspace(-8, 8, 1001)
    result = stub(model.eval(), x)
    assert result.changed == 1
    assert [n.meta["site"] for n in result.graph.graph.nodes if n.op == "call_function"] == sites
    torch.testing.assert_close(result.graph(x), model(x.clone()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first", [F.relu, F.relu6])
@pytest.mark.parametrize("second", [F.relu, F.relu6])
def test_two_clamps_are_one(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return second(first(self.conv(x)))

    model, x = Clamped().eval(), 9 * torch.randn(2, 3, 4, 4)
    result = stub(model, x)
    assert [op_class(n) for n in result.graph.graph.nodes].count("conv") == 1
    assert sum(op_class(n) in ("relu", "relu6") for n in result.graph.graph.nodes) == 1
    assert torch.equal(result.graph(x), model(x))


NEUTRAL: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: cast(Tensor, sum([x])),
    "add": lambda x: torch.add(x, 0.0),
    "in place": lambda x: x.add_(0),
    "mul": lambda x: 1 * x,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_arithmetic_that_changes_nothing_is_dropped(name: str) -> None:
    class Neutral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(NEUTRAL[name](self.conv(x)))

    model, x = Neutral().eval(), torch.randn(2, 3, 4, 4)
    result = stub(model, x)
    assert [op_class(n) for n in result.graph.graph.nodes if n.op.startswith("call")] == ["conv", "relu"]
    assert torch.equal(result.graph(x), model(x))


def test_arithmetic_that_changes_the_type_stays() -> None:
    model, x = Function(lambda x: (x > 0) * 1), torch.randn(2, 3)
    assert stub(model.eval(), x).graph(x).dtype == torch.int64


class TurnedNorm(nn.Module):
    """A LayerNorm over some of the last axes, between permutations that cancel."""

    def __init__(self, *normalized: int) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 1), nn.LayerNorm(normalized), nn.Conv2d(4, 2, 1)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return cast(Tensor, self.last(y))


@pytest.mark.parametrize("normalized", [(4,), (6, 4), (5, 6, 4)], ids=str)
def test_norms_between_transposes(normalized: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = TurnedNorm(*normalized).eval(), noise(2, 3, 5, 6)
    graph = stub(fuse(model, x).graph, x).graph
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)
    export_onnx(graph, x, tmp_path / "model.onnx")
    np.testing.assert_allclose(run_ort(tmp_path / "model.onnx", x), run_torch(model, x), atol=1e-5)
