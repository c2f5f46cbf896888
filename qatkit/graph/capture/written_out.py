"""Replaces functions of torch that hide products or in-place changes with the functions that they consist of.

The recorder is on while the latter run, so each of them becomes a node. Examples are the Linears of an
attention that is called as a function, the product with the weight of a bilinear form, the mask of a filled
diagonal, and the experts' Linears in a grouped matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.attention.multi_head import multi_head_attention
from qatkit.graph.capture.sized_calls import for_any_size
from qatkit.graph.open_modules import bilinear


def written_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Returns a function that computes `func` in parts; None if `func` becomes a single node."""
    if func is F.multi_head_attention_forward and not _static(args, kwargs):
        return _attention
    if func is F.bilinear:
        return bilinear
    if func is Tensor.fill_diagonal_ and args[0].ndim == 2 and not (kwargs.get("wrap") or args[2:]):
        return _fill_diagonal
    if func in _GROUPED or str(func) == _GROUPED_OF_TRANSFORMERS:
        return _grouped(*args, **kwargs)
    return for_any_size(func, args, kwargs)


def _static(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call of attention passes `static_k` or `static_v`."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    return given.get("static_k") is not None or given.get("static_v") is not None


_ARGUMENTS = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v",
    "average_attn_weights", "is_causal",
)  # fmt: skip


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Computes `F.multi_head_attention_forward`: passes its arguments to `multi_head_attention` as a module."""
    given = SimpleNamespace(**dict.fromkeys(_ARGUMENTS))
    for name, value in (dict(zip(_ARGUMENTS, args, strict=False)) | kwargs).items():
        setattr(given, name, value)
    separate = bool(given.use_separate_proj_weight)
    module = SimpleNamespace(
        embed_dim=given.query.shape[-1],
        num_heads=given.num_heads,
        head_dim=given.query.shape[-1] // given.num_heads,
        in_proj_weight=None if separate else given.in_proj_weight,
        in_proj_bias=given.in_proj_bias,
        q_proj_weight=given.q_proj_weight,
        k_proj_weight=given.k_proj_weight,
        v_proj_weight=given.v_proj_weight,
        bias_k=given.bias_k,
        bias_v=given.bias_v,
        add_zero_attn=given.add_zero_attn,
        dropout=given.dropout_p,
        training=given.training is not False,
        batch_first=False,
        out_proj=lambda y: F.linear(y, given.out_proj_weight, given.out_proj_bias),
    )
    return multi_head_attention(
        cast(nn.MultiheadAttention, module),
        given.query,
        given.key,
        given.value,
        given.key_padding_mask,
        given.need_weights is not False,
        given.attn_mask,
        given.average_attn_weights is not False,
    )


# F.grouped_mm came with torch 2.10.
_GROUPED = tuple(
    f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None
)

# The function that transformers calls for experts instead of F.grouped_mm during a compilation.
_GROUPED_OF_TRANSFORMERS = "transformers.grouped_mm_fallback"


def _grouped(x: Tensor, weight: Tensor, offs: Tensor | None = None, **more: Any) -> Callable[..., Any] | None:
    """Returns a function that computes `F.grouped_mm`.

    Supported are an `x` with one matrix per group, and an `x` with the rows of all groups, which end at
    `offs`. Returns None for other arguments, such as a bias or an output type.
    """
    if any(value is not None for value in more.values()):
        return None
    if x.ndim == weight.ndim == 3 and offs is None:
        return _stacked_groups
    return _groups_of_rows if x.ndim == 2 and weight.ndim == 3 else None


def _stacked_groups(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return torch.bmm(x, weight)


def _groups_of_rows(x: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """Multiplies each row by the matrix of its group.

    All matrices are applied in one product, and the result of the row's own group is kept.

    Args:
        x: the rows, [rows, inputs].
        weight: the matrix of each group, [groups, inputs, outputs].
        offs: the end of each group, as an index of rows, [groups].

    Returns:
        [rows, outputs]
    """
    count = torch.ones_like(x[:, :1], dtype=torch.int32).cumsum(0)  # 1, 2, 3, ...; no size is read
    begun = count <= offs  # [rows, groups]: false, ..., true, ...
    before = F.pad(begun.to(torch.int32), (1, -1)).to(torch.bool)
    every = torch.einsum("ri,gio->rgo", x, weight)
    return torch.where((begun & ~before).unsqueeze(-1), every, 0.0).sum(1)


def _fill_diagonal(x: Tensor, fill_value: float) -> Tensor:
    return x.masked_fill_(torch.eye(*x.shape, dtype=torch.bool, device=x.device), fill_value)
