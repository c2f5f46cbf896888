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
        q, k, v = split_heads(self.qkv(x), self.heads)
        scores = similarity(q * self.width**-0.5, k, self.heads)
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


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[N, T, 3·E] → q, k, v, each [N, heads, T, E/heads]."""
    parts = qkv.chunk(3, dim=-1)
    q, k, v = (parts[i].unflatten(-1, (heads, -1)).transpose(1, 2) for i in range(3))
    return q, k, v


def similarity(q: Tensor, k: Tensor, heads: int) -> Tensor:
    """q·kᵀ, [N, heads, T, T].

    The keys are transposed alone: behind the split into heads, ONNX Runtime would make one Transpose of both,
    five times as slow as the first, and could not leave the second to its matrix product.
    """
    scores: Tensor = torch.matmul(q.flatten(0, 1), k.flatten(0, 1).transpose(-2, -1))
    return torch.unflatten(scores, 0, (-1, heads))


@dataclass(frozen=True)
class Windows:
    """How `shifted_window_attention` cuts a feature map [N, *size, C] into windows.

    Attributes:
        size: of the map, two numbers (three in a video).
        window, shift: along each axis; shift is 0 where a window covers the whole map.
    """

    size: tuple[int, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...]

    @property
    def padded(self) -> tuple[int, ...]:
        """The size, up to multiples of the window."""
        return tuple(-(-n // w) * w for n, w in zip(self.size, self.window, strict=True))

    @property
    def tokens(self) -> int:
        return math.prod(self.window)

    @property
    def count(self) -> int:
        return math.prod(self.padded) // self.tokens

    def cut(self, grid: Tensor) -> Tensor:
        """[*padded] → [windows, tokens]."""
        pairs = [(n // w, w) for n, w in zip(self.padded, self.window, strict=True)]
        axes = range(2 * len(pairs))
        apart = grid.reshape([n for pair in pairs for n in pair]).permute(*axes[::2], *axes[1::2])
        return apart.reshape(self.count, self.tokens)

    def order(self) -> Tensor:
        """Which token of the padded map, counted row by row, comes where: [windows · tokens]."""
        grid = torch.arange(math.prod(self.padded)).reshape(self.padded)
        return self.cut(grid.roll([-s for s in self.shift], tuple(range(grid.ndim)))).reshape(-1)

    def back(self) -> Tensor:
        """Where each token of the map, counted row by row, went: [prod(size)]."""
        places = torch.argsort(self.order()).reshape(self.padded)
        return places[tuple(slice(n) for n in self.size)].reshape(-1)

    def mask(self) -> Tensor:
        """[windows, 1, tokens, tokens]: -100 between tokens that the shift has brought together."""
        region = torch.zeros(self.padded)
        for axis, (w, s) in enumerate(zip(self.window, self.shift, strict=True)):
            if s:
                along = region.movedim(axis, 0) * 3
                along[-w:-s] += 1
                along[-s:] += 2
                region = along.movedim(0, axis)
        cut = self.cut(region)
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
    order: Tensor
    back: Tensor

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
        # One Gather each way, in 8 bits on the way in: a roll, a reshape and a Transpose are three passes more.
        self.register_buffer("order", windows.order(), persistent=False)
        self.register_buffer("back", windows.back(), persistent=False)
        if any(windows.shift):
            self.register_buffer("attention_mask", windows.mask(), persistent=False)

    def scores(self, q: Tensor, k: Tensor, *_: Tensor) -> Tensor:
        """q, k: [windows, heads, tokens, width]."""
        return similarity(q * q_scale(self.qkv, self.heads), k, self.heads)

    def attend(self, x: Tensor, bias: Tensor, *extra: Tensor) -> Tensor:
        """x: [N, *size, C], bias: [1, heads, tokens, tokens]; [N, *size, C] comes back."""
        cut, channels, heads = self.windows, self.qkv.in_features, self.heads
        padding = [p - n for p, n in zip(cut.padded, cut.size, strict=True)]
        if any(padding):
            x = F.pad(x, [n for p in (0, *padding[::-1]) for n in (0, p)])
        x = x.flatten(1, -2).index_select(1, self.order).reshape(-1, cut.tokens, channels)
        q, k, v = split_heads(self.qkv(x), heads)
        scores = self.scores(q, k, *extra)
        if any(cut.shift):
            scores = scores.reshape(-1, cut.count, heads, cut.tokens, cut.tokens)
            scores = (scores + (self.attention_mask + bias)).reshape(-1, heads, cut.tokens, cut.tokens)
        else:
            scores = scores + bias
        weights = self.attention_drop(torch.softmax(scores, dim=-1))
        x = torch.matmul(weights, v).transpose(1, 2).reshape(-1, cut.tokens, channels)
        x = self.drop(self.proj(x)).reshape(-1, cut.count * cut.tokens, channels)
        return x.index_select(1, self.back).reshape(-1, *cut.size, channels)

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
        cosine = similarity(F.normalize(q, dim=-1), F.normalize(k, dim=-1), self.heads)
        return cosine * torch.clamp(extra[0], max=math.log(100.0)).exp()

    def forward(self, x: Tensor, bias: Tensor, logit_scale: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, bias, logit_scale)


def q_scale(qkv: nn.Linear, heads: int) -> float:
    """1 / sqrt(width of a head)."""
    return float((qkv.in_features // heads) ** -0.5)
