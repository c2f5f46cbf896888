"""Computes nn.MultiheadAttention by separate operators, for the calls that `self_attention` does not support.

These are calls with cross attention, masks, keys and values of other widths, additional keys (`add_bias_kv`,
`add_zero_attn`) or attention weights that are used, and calls of a module that is called more than once. T is
the number of queries, S the number of keys, and E the width of the queries.

    q, k, v = Linear(query), Linear(key), Linear(value)   each with its rows of the joint weight
    w = softmax(q·kᵀ / sqrt(E/heads) + mask)              [N, heads, T, S]
    out = Linear(w·v)                                      [N, T, E]

Source: Vaswani et al., "Attention is all you need", 2017, section 3.2; masks as in `torch.nn.MultiheadAttention`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def multi_head_attention(  # noqa: PLR0913, PLR0917  the arguments of the module's forward
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes the forward of `module`, which has the same arguments and results.

    `is_causal` is ignored: it is only a hint about `attn_mask`.
    """
    alone = query.ndim == 2
    if alone:
        query, key, value = (t.unsqueeze(0 if module.batch_first else 1) for t in (query, key, value))
    if not module.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    q, k, v = _projections(module, query, key, value)
    extra = 0
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.expand(k.shape[0], -1, -1)], 1)
        v = torch.cat([v, module.bias_v.expand(v.shape[0], -1, -1)], 1)
        extra += 1
    heads, width = module.num_heads, module.head_dim
    q, k, v = (t.reshape(t.shape[0], t.shape[1], heads, width).transpose(1, 2) for t in (q, k, v))
    if module.add_zero_attn:
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        extra += 1
    scores = torch.matmul(q * width**-0.5, k.transpose(-2, -1))
    for mask in (_mask(attn_mask, q, extra), _padding(key_padding_mask, q, extra)):
        scores = scores if mask is None else scores + mask
    weights = torch.softmax(scores, -1)
    weights = F.dropout(weights, module.dropout, module.training)
    y = torch.matmul(weights, v).transpose(1, 2).flatten(2)
    y = module.out_proj(y)
    y = y if module.batch_first else y.transpose(0, 1)
    shown = (weights.mean(1) if average_attn_weights else weights) if need_weights else None
    if alone:
        y = y.squeeze(0 if module.batch_first else 1)
        shown = None if shown is None else shown.squeeze(0)
    return y, shown


def _projections(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    size, bias = module.embed_dim, module.in_proj_bias
    biases = [None] * 3 if bias is None else [bias[i * size : (i + 1) * size] for i in range(3)]
    joint = module.in_proj_weight
    if joint is None:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    elif query is key is value:
        q, k, v = F.linear(query, joint, bias).chunk(3, -1)
        return q, k, v
    else:
        weights = [joint[i * size : (i + 1) * size] for i in range(3)]
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def _mask(mask: Tensor | None, like: Tensor, extra: int) -> Tensor | None:
    """Returns a mask to add to the scores, [T, S + extra] or [N, heads, T, S + extra]; None without a mask.

    Args:
        mask: [T, S] or [N·heads, T, S], boolean (true where a query may not attend to a key) or float, or None.
        like: a tensor with the type of the scores and the heads as its second axis.
        extra: number of keys that are appended; they are never masked.
    """
    if mask is None:
        return None
    mask = _as_float(mask, like)
    mask = F.pad(mask, (0, extra)) if extra else mask
    return mask if mask.ndim == 2 else mask.reshape(-1, like.shape[1], *mask.shape[1:])


def _padding(mask: Tensor | None, like: Tensor, extra: int) -> Tensor | None:
    """Returns a padding mask [N, S] as one to add to the scores, [N, 1, 1, S + extra]; None without a mask."""
    if mask is None:
        return None
    mask = _as_float(mask, like)
    mask = F.pad(mask, (0, extra)) if extra else mask
    return mask[:, None, None]


def _as_float(mask: Tensor, like: Tensor) -> Tensor:
    return (
        torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
        if mask.dtype == torch.bool
        else mask
    )
