"""Computes the self-attention of nn.MultiheadAttention by operators that can be quantized.

    qkv = Linear(x)                       [N, T, 3·E]
    q, k, v                               [N, heads, T, E/heads] each
    y = softmax(q·kᵀ / sqrt(E/heads))·v   [N, heads, T, E/heads]
    out = Linear(y)                       [N, T, E]

`nn.MultiheadAttention` is a leaf in torch.fx, so its two Linears and two MatMuls would all stay in floating point.
`qatkit.graph.attention.swin` does the same for Swin's windows.
Source: Vaswani et al., "Attention is all you need", 2017, section 3.2.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx, nn

_ATTENTION_ARGUMENTS = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal",
)  # fmt: skip


class SelfAttention(nn.Module):
    """Self-attention with the parameters of an `nn.MultiheadAttention`; the outputs of both agree to 1e-5."""

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        assert original.in_proj_weight is not None
        self.heads, self.width = original.num_heads, original.head_dim
        self.batch_first, self.dropout = original.batch_first, nn.Dropout(original.dropout)
        biased = original.in_proj_bias is not None
        self.qkv = nn.Linear(original.embed_dim, 3 * original.embed_dim, bias=biased)
        self.qkv.weight = original.in_proj_weight
        if biased:
            self.qkv.bias = original.in_proj_bias
        # MultiheadAttention has its own subclass of Linear, which differs from Linear only in its type.
        self.out_proj = nn.Linear(
            original.embed_dim, original.embed_dim, bias=original.out_proj.bias is not None
        )
        self.out_proj.weight = original.out_proj.weight
        if original.out_proj.bias is not None:
            self.out_proj.bias = original.out_proj.bias
        self.train(original.training)

    def forward(self, x: Tensor) -> Tensor:
        """Computes self-attention of x [N, T, E] (or [T, N, E] with batch_first=False); returns the same shape."""
        if not self.batch_first:
            x = x.transpose(0, 1)
        q, k, v = split_heads(self.qkv(x), self.heads)
        scores = per_image(similarity(q, k, self.width**-0.5), self.heads)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        y: Tensor = self.out_proj(torch.matmul(weights, per_image(v, self.heads)).transpose(1, 2).flatten(2))
        return y if self.batch_first else y.transpose(0, 1)


def why_not(module: nn.MultiheadAttention) -> str | None:
    """Returns why `SelfAttention` can't replace a MultiheadAttention, however it is called; None if it can."""
    if module.in_proj_weight is None:
        return "its keys and values have another width than the queries"
    if module.bias_k is not None or module.add_zero_attn:
        return "add_bias_kv or add_zero_attn is set"
    return None


def unusual_call(node: fx.Node) -> str | None:
    """Returns why `SelfAttention` can't replace a call of a MultiheadAttention; None if it can."""
    given = dict(zip(_ATTENTION_ARGUMENTS, node.args, strict=False)) | node.kwargs
    if sum(n.op == "call_module" and n.target == node.target for n in node.graph.nodes) > 1:
        return "it is called more than once"
    if not given["query"] is given["key"] is given["value"]:
        return "query, key and value are not the same tensor"
    if any(given.get(k) not in (None, False) for k in ("key_padding_mask", "attn_mask", "is_causal")):
        return "a mask is given"
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return "its attention weights are read"
    return None


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [N, T, 3·E] into q, k, v, each [1, N·heads, T, E/heads].

    All three are transposed together before they are separated into three blocks of memory. A Split of every row and
    three Transposes would take longer (docs/decisions/0028-file-level-costs.md).
    """
    parts = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2).chunk(3)
    return parts[0], parts[1], parts[2]


def similarity(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Returns q·kᵀ times `scale`, [1, N·heads, T, T].

    The scale is applied right after the product, and the keys have a Transpose of their own, since ONNX
    Runtime fuses both into its matrix product. It does not fuse a Transpose that was merged with another one.
    """
    scores: Tensor = torch.matmul(q, k.transpose(-2, -1))
    return scores if scale is None else scores * scale


def per_image(x: Tensor, heads: int) -> Tensor:
    """Reshapes [1, N·heads, ...] → [N, heads, ...]."""
    apart: Tensor = x.flatten(0, 1).unflatten(0, (-1, heads))
    return apart
