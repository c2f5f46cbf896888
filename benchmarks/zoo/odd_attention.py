"""Attention as users write it: masks, positions, caches, custom kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector

odd = List("odd")
ENTRIES = odd.entries


class Block(nn.Module):
    """A pre-norm block: self-attention by hand, and an MLP."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        x = x + self.proj(self.attend(q, k, v).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns attention over queries, keys and values, [b, heads, t, size] each."""
        return (q @ k.transpose(-2, -1) * self.size**-0.5).softmax(dim=-1) @ v


class Stack(nn.Module):
    """An embedding of vectors [N, T, 16], blocks, and a head on the mean over T."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(16, 32), nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))).mean(1))


class _Causal(Block):
    """A causal mask, made in forward by `tril` and filled with -inf."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.size(-2)
        score = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        hidden = torch.tril(torch.ones(t, t, device=q.device)).view(1, 1, t, t) == 0
        return F.softmax(score.masked_fill(hidden, float("-inf")), dim=-1) @ v


@odd(vector(9, 16))
def causal_mask() -> nn.Module:
    """GPT's attention: a causal mask made from the length."""
    return Stack(_Causal(), _Causal())


class _Buffered(Block):
    """The causal mask of nanoGPT: a triangular buffer, cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("triangle", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))
        self.triangle: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.size(2)
        score = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        score = score.masked_fill(self.triangle[:, :, :t, :t] == 0, torch.finfo(score.dtype).min)
        return F.dropout(score.softmax(-1), 0.1, self.training) @ v


@odd(vector(9, 16))
def buffered_mask() -> nn.Module:
    """A causal mask as a buffer, and functional dropout of the attention weights."""
    return Stack(_Buffered(), _Buffered())


class _Sdpa(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0
        )


@odd(vector(9, 16))
def sdpa_causal() -> nn.Module:
    """`scaled_dot_product_attention(is_causal=True)` with dropout in training."""
    return Stack(_Sdpa(), _Sdpa())


class _Rotary(Block):
    """Rotary position embeddings, computed in forward from the length."""

    @staticmethod
    def half_turned(x: Tensor) -> Tensor:
        """Returns (-b, a) for channels with the halves (a, b)."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rate = 1.0 / (100 ** (torch.arange(0, self.size, 2, device=q.device).float() / self.size))
        angle = torch.outer(torch.arange(q.shape[-2], device=q.device).float(), rate)
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
        q = q * cos + self.half_turned(q) * sin
        k = k * cos + self.half_turned(k) * sin
        return F.scaled_dot_product_attention(q, k, v)


@odd(vector(9, 16))
def rotary() -> nn.Module:
    """Rotary position embeddings in halves (LLaMA)."""
    return Stack(_Rotary(), _Rotary())


class _Interleaved(Block):
    """Rotary position embeddings of even and odd channels, stacked and flattened."""

    def __init__(self) -> None:
        super().__init__()
        angle = torch.arange(32)[:, None] / (50 ** (torch.arange(0, self.size, 2) / self.size))[None]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Rotates each pair of channels by the angle of its position."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        even, odd_ = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd_ * sin, even * sin + odd_ * cos), dim=-1).flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.turn(q), self.turn(k), v)


@odd(vector(9, 16))
def rotary_interleaved() -> nn.Module:
    """Rotary position embeddings of channel pairs, with tables as buffers."""
    return Stack(_Interleaved(), _Interleaved())


class _Alibi(Block):
    """A bias linear in the distance, with one slope per head."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[2]
        place = torch.arange(t)
        slopes = torch.tensor([2.0 ** -(i + 1) for i in range(self.heads)]).view(1, -1, 1, 1)
        bias = -(place[None] - place[:, None]).abs()[None, None] * slopes
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@odd(vector(9, 16))
def alibi() -> nn.Module:
    """ALiBi: a float attention mask made from the length."""
    return Stack(_Alibi(), _Alibi())


class _Relative(Block):
    """Relative position buckets (T5): an Embedding of constant indices as the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(17, self.heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        distance = (place[None] - place[:, None]).clamp(-8, 8) + 8
        bias = self.bias(distance).permute(2, 0, 1).unsqueeze(0)
        return (q @ k.transpose(-1, -2) * self.size**-0.5 + bias).softmax(-1) @ v


@odd(vector(9, 16))
def relative_bias() -> nn.Module:
    """Relative position biases from an Embedding of constant indices."""
    return Stack(_Relative(), _Relative())


@odd(
    {
        "x": vector(9, 16),
        "padding": lambda n, g: torch.arange(9).expand(n, 9) >= 9 - torch.randint(0, 4, (n, 1), generator=g),
    }
)
class KeyPadding(nn.Module):
    """`nn.MultiheadAttention` with a boolean key padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(16, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 6)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.embed(x)
        found, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        kept = (~padding).unsqueeze(-1).to(x.dtype)
        return self.head(((x + found) * kept).sum(1) / kept.sum(1))


@odd(vector(9, 16))
def encoder_layers() -> nn.Module:
    """`nn.TransformerEncoder`, pre-norm, with GELU."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
    return Stack(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


@odd((vector(7, 32), vector(9, 32)))
class Seq2Seq(nn.Module):
    """`nn.Transformer` with a causal target mask."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.Transformer(32, 4, 1, 1, 64, batch_first=True), nn.Linear(32, 8)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        hidden = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        return self.head(self.core(source, target, tgt_mask=hidden, tgt_is_causal=True))


@odd((image(3, 32, 32), vector(5, 24)))
class CrossAttention(nn.Module):
    """Image tokens that attend to input vectors (conditioning of diffusion models)."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.q = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 32, bias=False)
        self.kv, self.out, self.head = nn.Linear(24, 64, bias=False), nn.Linear(32, 32), nn.Linear(32, 6)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.kv(context).chunk(2, dim=-1))
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head((x + self.out(found)).mean(1))


@odd(vector(20, 16))
class Perceiver(nn.Module):
    """Learned latents, repeated over the batch, that attend to a long input."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, 32) * 0.5)
        self.embed, self.read = nn.Linear(16, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.block, self.head = Block(), nn.Linear(4 * 32, 6)

    def forward(self, x: Tensor) -> Tensor:
        data = self.embed(x)
        latents = self.latents.unsqueeze(0).repeat(data.shape[0], 1, 1)
        latents = latents + self.read(latents, data, data)[0]
        return self.head(self.block(latents).flatten(1))


class _LinearAttention(Block):
    """Kernel attention with the feature map elu + 1; keys and values are multiplied first."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bhtd,bhte->bhde", k, v)
        scale = 1 / torch.einsum("bhtd,bhd->bht", q, k.sum(dim=2)).clamp(min=1e-6)
        return torch.einsum("bhtd,bhde,bht->bhte", q, kv, scale)


@odd(vector(9, 16))
def linear_attention() -> nn.Module:
    """Linear attention with einsum of activations."""
    return Stack(_LinearAttention(), _LinearAttention())


class _Grouped(Block):
    """Grouped-query attention: keys and values are repeated over heads; RMSNorm on q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.q = nn.Linear(32, 2 * 2 * 8), nn.Linear(32, 32)
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.norm1(x)
        q = self.q(y).view(b, t, 4, 8).transpose(1, 2)
        k, v = self.kv(y).view(b, t, 2, 2, 8).permute(2, 0, 3, 1, 4)
        k, v = k.repeat_interleave(2, dim=1), v[:, :, None].expand(b, 2, 2, t, 8).reshape(b, 4, t, 8)
        found = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return x + self.proj(found.transpose(1, 2).reshape(b, t, c))


@odd(vector(9, 16))
def grouped_query() -> nn.Module:
    """Grouped-query attention with normalized queries and keys."""
    return Stack(_Grouped(), _Grouped())


class _Windowed(nn.Module):
    """Shifted windows on a grid (Swin), without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        side = int(t**0.5)
        x = torch.roll(x.view(b, side, side, c), (-1, -1), (1, 2))
        windows = x.view(b, side // 2, 2, side // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        windows = self.block(windows)
        x = windows.view(b, side // 2, side // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, side, side, c)
        return torch.roll(x, (1, 1), (1, 2)).view(b, t, c)


@odd(vector(16, 16))
def windows() -> nn.Module:
    """Shifted windows: a roll, windows folded into the batch axis, and the roll back."""
    return Stack(_Windowed(), _Windowed())


class _TopKeys(Block):
    """Sparse attention: each query attends only to its three best keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = q @ k.transpose(-2, -1) * self.size**-0.5
        least = score.topk(3, dim=-1).values[..., -1:]
        return torch.where(score < least, float("-inf"), score).softmax(-1) @ v


@odd(vector(9, 16))
def top_keys() -> nn.Module:
    """`topk` of the scores as a threshold, which depends on values but changes no shape and no branch."""
    return Stack(_TopKeys())
