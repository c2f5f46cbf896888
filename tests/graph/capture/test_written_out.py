"""Tests of decomposed functions: attention, bilinear forms, clamps, grouped products, filled diagonals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from captures import Calls, Of, noise_of, same
from chain import run_ort
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.trace import trace


def attend(m: Any, x: Tensor, need: bool = False, **more: Any) -> Any:
    y = x.transpose(0, 1)
    return F.multi_head_attention_forward(
        y[:2], y, y, 6, 2, m.qkv.weight, m.qkv.bias, None, None, more.pop("zero", False), 0.0,
        m.out.weight, m.out.bias, training=m.training, need_weights=need, **more,
    )  # fmt: skip


def separate(m: Any, x: Tensor) -> Any:
    q, k, v = m.qkv.weight.chunk(3)
    weights = {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v}
    y = x.transpose(0, 1)
    return F.multi_head_attention_forward(
        query=y, key=y, value=y, embed_dim_to_check=6, num_heads=2, in_proj_weight=None, in_proj_bias=m.qkv.bias,
        bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0, out_proj_weight=m.out.weight,
        out_proj_bias=m.out.bias, use_separate_proj_weight=True, training=False, need_weights=False, **weights,
    )[0]  # fmt: skip


ATTENTION = {
    "plain": lambda m, x: attend(m, x)[0],
    "weights": lambda m, x: attend(m, x, need=True),
    "weights of each head": lambda m, x: attend(m, x, need=True, average_attn_weights=False),
    "zeros": lambda m, x: attend(m, x, zero=True)[0],
    "separate": separate,
    "mask": lambda m, x: attend(m, x, attn_mask=torch.ones(2, 5).tril().log())[0],
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_as_a_function(name: str) -> None:
    torch.manual_seed(0)
    model = Calls(ATTENTION[name], qkv=nn.Linear(6, 18), out=nn.Linear(6, 6)).eval()
    graph = same(model, noise_of(2, 5, 6), tolerance=1e-5)
    names = {getattr(node.target, "__name__", "") for node in graph.graph.nodes}
    assert "linear" in names and "multi_head_attention_forward" not in names


def test_bilinear_form() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(5, 6, 4)), nn.Parameter(torch.randn(5))
    model = Calls(lambda m, x, y: F.bilinear(x, y, m.weight, bias=m.bias), weight=weight, bias=bias)
    graph = same(model, (noise_of(2, 3, 6), noise_of(2, 3, 4, seed=1)), tolerance=1e-5)
    assert F.bilinear not in {node.target for node in graph.graph.nodes}


def filled(x: Tensor) -> Tensor:
    return x[..., None] * torch.ones(6, 6).fill_diagonal_(-2.0)


def filled_values(x: Tensor) -> Tensor:
    y = x.mean((1, 2)).t() @ x.mean((1, 2))
    return x + y.fill_diagonal_(0.5)[:4]


def diagonal(x: Tensor) -> Tensor:
    square = x[:, 0, :, :4].clone()
    square.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return square


def diagonal_of_values(x: Tensor) -> Tensor:
    y = x.clone()
    torch.diagonal(y, offset=1, dim1=3, dim2=1).copy_(x[:, 1, :, :2] * 2)
    y.diagonal(-1, 2, 3).mul_(3)
    return y


@pytest.mark.parametrize("function", [filled, filled_values, diagonal, diagonal_of_values])
def test_diagonals(function: Any) -> None:
    same(Of(function), noise_of(2, 3, 4, 6), tolerance=1e-5)


@pytest.mark.parametrize("function", [lambda x: torch.clamp(x, -1, 1.5), lambda x: x.clip(min=-0.5, max=1)])
def test_bounds_of_two_types_become_one(function: Any) -> None:
    graph = same(Of(function), noise_of(2, 3, 4, 6))
    (node,) = [n for n in graph.graph.nodes if n.target in ("clamp", "clip", torch.clamp)]
    assert {type(bound) for bound in (*node.args[1:], *node.kwargs.values())} == {float}


def grouped_mm_of_transformers() -> Any:
    """Returns the operator that transformers registers for compiled experts, or a substitute."""
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        torch.library.custom_op(
            "transformers::grouped_mm_fallback",
            lambda x, weight, offs: F.grouped_mm(x, weight, offs=offs),
            mutates_args=(),
            schema="(Tensor input, Tensor weight, Tensor offs) -> Tensor",
        )
    return torch.ops.transformers.grouped_mm_fallback


def experts(m: Any, x: Tensor) -> Tensor:
    """Sorts rows by expert, multiplies each group by two weights of its expert, and restores the order."""
    grouped_mm = m.grouped_mm
    rows = x.flatten(0, 1)
    chosen = m.router(rows).argmax(-1)
    order = chosen.argsort(stable=True)
    ends = F.one_hot(chosen, 5).sum(0).cumsum(0).to(torch.int32)
    y = grouped_mm(grouped_mm(rows[order], m.up, offs=ends), m.down.transpose(1, 2), offs=ends)
    return cast(Tensor, y[order.argsort()].view_as(x))


def one_by_one(m: Any, x: Tensor) -> Tensor:
    chosen = m.router(x).argmax(-1)
    return torch.stack(
        [
            torch.stack([row @ m.up[k] @ m.down[k].T for row, k in zip(rows, ks, strict=True)])
            for rows, ks in zip(x, chosen.tolist(), strict=True)
        ]
    )


@pytest.mark.parametrize("function", [lambda: F.grouped_mm, grouped_mm_of_transformers])
def test_products_of_groups_of_rows(function: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    up, down = nn.Parameter(torch.randn(5, 8, 16)), nn.Parameter(torch.randn(5, 8, 16))
    model = Calls(experts, router=nn.Linear(8, 5), up=up, down=down, grouped_mm=function()).eval()
    graph = same(model, noise_of(2, 3, 8), tolerance=1e-5)
    assert "grouped_mm" not in str(graph.graph)
    x, path = noise_of(4, 3, 8, seed=3), tmp_path / "model.onnx"
    wanted = one_by_one(model, x).detach()
    torch.testing.assert_close(graph(x), wanted, rtol=1e-4, atol=1e-4)
    export_onnx(graph, x[:2], path)
    np.testing.assert_allclose(run_ort(path, x), wanted, rtol=1e-4, atol=1e-4)


def test_products_of_stacked_groups() -> None:
    weight = nn.Parameter(noise_of(3, 8, 16))
    model = Calls(lambda m, x: F.grouped_mm(x.mT @ x, m.weight[:2].expand(2, 8, 16)), weight=weight).eval()
    x = noise_of(2, 5, 8)
    graph = trace(model, x)
    assert "grouped_mm" not in str(graph.graph)
    torch.testing.assert_close(graph(x), (x.mT @ x) @ weight[:2], rtol=1e-4, atol=1e-4)


def test_rows_behind_the_last_group_are_zero() -> None:
    """PyTorch's own `grouped_mm` leaves rows after the last group uninitialized; here, they become zeros."""
    ends = torch.tensor([2, 2, 4], dtype=torch.int32)
    weight = nn.Parameter(noise_of(3, 8, 8))
    model = Calls(lambda m, x: F.grouped_mm(x.mean(0), m.weight, offs=m.ends), weight=weight)
    model.register_buffer("ends", ends)
    x = noise_of(2, 6, 8)
    y, rows = trace(model.eval(), x)(x), x.mean(0)
    wanted = torch.cat([rows[:2] @ weight[0], rows[2:4] @ weight[2], torch.zeros(2, 8)])
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
