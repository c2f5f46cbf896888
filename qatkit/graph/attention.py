"""Twins of attention that hides its arithmetic, built of operators that can be quantized.

    qkv = Linear(x)                       [N, T, 3·E]
    q, k, v                               [N, heads, T, E/heads] each
    y = softmax(q·kᵀ / sqrt(E/heads))·v   [N, heads, T, E/heads]
    out = Linear(y)                       [N, T, E]

`nn.MultiheadAttention` and torchvision's `shifted_window_attention` are each one leaf to torch.fx, so their
two Linears and two MatMuls would all stay in floating point.
Sources: Vaswani et al., "Attention is all you need", 2017, section 3.2; Liu et al., "Swin Transformer", 2021,
and "Swin Transformer V2", 2022 (cosine attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Self-attention with the weights of an `nn.MultiheadAttention`; equal to it to 1e-5."""

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
        # MultiheadAttention's own subclass of Linear is plain in all but its type.
        self.out_proj = nn.Linear(
            original.embed_dim, original.embed_dim, bias=original.out_proj.bias is not None
        )
        self.out_proj.weight = original.out_proj.weight
        if original.out_proj.bias is not None:
            self.out_proj.bias = original.out_proj.bias
        self.train(original.training)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, T, E] (or [T, N, E] with batch_first=False); the same shape comes back."""
        if not self.batch_first:
            x = x.transpose(0, 1)
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.width)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = torch.matmul(q * self.width**-0.5, k.transpose(-2, -1))
        weights = self.dropout(torch.softmax(scores, dim=-1))
        y: Tensor = self.out_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return y if self.batch_first else y.transpose(0, 1)


def why_not(module: nn.MultiheadAttention) -> str | None:
    """Why a MultiheadAttention has no twin here; None when it has one."""
    if module.in_proj_weight is None:
        return "keys and values of another width than the queries"
    if module.bias_k is not None or module.add_zero_attn:
        return "add_bias_kv or add_zero_attn"
    return None


@dataclass(frozen=True)
class Windows:
    """How `shifted_window_attention` cuts a feature map [N, height, width, C] into windows.

    Attributes:
        window, shift: rows and columns; shift is 0 where a window covers the whole map.
        rows, columns: of the map, padded to multiples of the window.
    """

    height: int
    width: int
    window: tuple[int, int]
    shift: tuple[int, int]

    @property
    def rows(self) -> int:
        return -(-self.height // self.window[0]) * self.window[0]

    @property
    def columns(self) -> int:
        return -(-self.width // self.window[1]) * self.window[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Windows per column and per row."""
        return self.rows // self.window[0], self.columns // self.window[1]

    @property
    def tokens(self) -> int:
        return self.window[0] * self.window[1]

    def mask(self) -> Tensor:
        """[windows, 1, tokens, tokens]: -100 between tokens that the shift has brought together."""
        region = torch.zeros(self.rows, self.columns)
        spans = [
            ((0, -w), (-w, -s), (-s, None)) if s else ((0, None),)
            for w, s in zip(self.window, self.shift, strict=True)
        ]
        for i, (top, bottom) in enumerate(spans[0]):
            for j, (left, right) in enumerate(spans[1]):
                region[top:bottom, left:right] = i * len(spans[1]) + j
        cut = region.view(self.grid[0], self.window[0], self.grid[1], self.window[1]).permute(0, 2, 1, 3)
        cut = cut.reshape(-1, self.tokens)
        return torch.where(cut.unsqueeze(1) == cut.unsqueeze(2), 0.0, -100.0).unsqueeze(1)


class WindowAttention(nn.Module):
    """`shifted_window_attention` (Swin) for one size of feature map; equal to it to 1e-5.

    Args:
        qkv, proj: its two Linears.
        heads: attention heads.
        windows: the cut.
        attention_dropout, dropout: rates.
    """

    attention_mask: Tensor

    def __init__(
        self,
        qkv: nn.Linear,
        proj: nn.Linear,
        heads: int,
        windows: Windows,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.windows = qkv, proj, heads, windows
        self.attention_drop, self.drop = nn.Dropout(attention_dropout), nn.Dropout(dropout)
        if any(windows.shift):
            self.register_buffer("attention_mask", windows.mask(), persistent=False)

    def scores(self, q: Tensor, k: Tensor, *_: Tensor) -> Tensor:
        """q, k: [windows, heads, tokens, width]."""
        return torch.matmul(q * q_scale(self.qkv, self.heads), k.transpose(-2, -1))

    def attend(self, x: Tensor, bias: Tensor, *extra: Tensor) -> Tensor:
        """x: [N, H, W, C], bias: [1, heads, tokens, tokens]; [N, H, W, C] comes back."""
        cut, channels, heads = self.windows, self.qkv.in_features, self.heads
        padding = (0, 0, 0, cut.columns - cut.width, 0, cut.rows - cut.height)
        if any(padding):
            x = F.pad(x, padding)
        if any(cut.shift):
            x = torch.roll(x, (-cut.shift[0], -cut.shift[1]), (1, 2))
        x = x.reshape(-1, cut.grid[0], cut.window[0], cut.grid[1], cut.window[1], channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, cut.tokens, channels)
        qkv = self.qkv(x).reshape(-1, cut.tokens, 3, heads, channels // heads).permute(2, 0, 3, 1, 4)
        scores = self.scores(qkv[0], qkv[1], *extra)
        if any(cut.shift):
            count = cut.grid[0] * cut.grid[1]
            scores = scores.reshape(-1, count, heads, cut.tokens, cut.tokens)
            scores = (scores + (self.attention_mask + bias)).reshape(-1, heads, cut.tokens, cut.tokens)
        else:
            scores = scores + bias
        weights = self.attention_drop(torch.softmax(scores, dim=-1))
        x = torch.matmul(weights, qkv[2]).transpose(1, 2).reshape(-1, cut.tokens, channels)
        x = self.drop(self.proj(x))
        x = x.reshape(-1, cut.grid[0], cut.grid[1], cut.window[0], cut.window[1], channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, cut.rows, cut.columns, channels)
        if any(cut.shift):
            x = torch.roll(x, cut.shift, (1, 2))
        return x[:, : cut.height, : cut.width, :] if any(padding) else x

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.attend(x, bias)


class CosineWindowAttention(WindowAttention):
    """Swin V2: cosine similarity times a learned scale per head, and keys without a bias."""

    def __init__(self, qkv: nn.Linear, proj: nn.Linear, heads: int, windows: Windows, *drops: float) -> None:
        super().__init__(qkv, proj, heads, windows, *drops)
        if qkv.bias is not None:
            # The original zeroes the keys' part on every call; here it is zero and gets no gradient.
            third = qkv.bias.numel() // 3
            keep = torch.ones_like(qkv.bias.detach())
            keep[third : 2 * third] = 0.0
            with torch.no_grad():
                qkv.bias.mul_(keep)
            qkv.bias.register_hook(lambda grad: grad * keep.to(grad.device))

    def scores(self, q: Tensor, k: Tensor, *extra: Tensor) -> Tensor:
        """q, k: [windows, heads, tokens, width]; extra: log of the scale [heads, 1, 1]."""
        similarity = torch.matmul(F.normalize(q, dim=-1), F.normalize(k, dim=-1).transpose(-2, -1))
        return similarity * torch.clamp(extra[0], max=math.log(100.0)).exp()

    def forward(self, x: Tensor, bias: Tensor, logit_scale: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, bias, logit_scale)


def q_scale(qkv: nn.Linear, heads: int) -> float:
    """1 / sqrt(width of a head)."""
    return float((qkv.in_features // heads) ** -0.5)
