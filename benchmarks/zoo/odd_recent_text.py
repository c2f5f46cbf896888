"""Blocks of language models of 2024 to 2026: attention with gates, sinks and latents, routing, norms, residuals."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, fixed, tokens, vector

odd = List("odd")
ENTRIES = odd.entries


class RmsNorm(nn.Module):
    """Root mean square normalization in float32, as in the published code of language models."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class SwiGlu(nn.Module):
    """A gated feed-forward layer with gate and value projections in one matrix."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


def rotate(x: Tensor, start: int = 0) -> Tensor:
    """Returns `x` [batch, heads, time, width] with rotary position embeddings; channel i is paired with i + width/2."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = torch.outer(torch.arange(start, start + x.shape[-2], device=x.device).float(), rate)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    x1, x2 = x[..., :half], x[..., half:]
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


def heads(x: Tensor, count: int) -> Tensor:
    """Returns [batch, time, width] as [batch, heads, time, width of a head]."""
    b, t, _ = x.shape
    return x.view(b, t, count, -1).transpose(1, 2)


@odd(vector(12, 32))
class GatedAttention(nn.Module):
    """Attention with a sigmoid gate on its output, normalized queries and keys, and grouped queries."""

    def __init__(self, width: int = 32, count: int = 4) -> None:
        super().__init__()
        self.count, self.norm = count, RmsNorm(width)
        self.q, self.kv = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = RmsNorm(width // count), RmsNorm(width // count)
        self.out, self.mlp = nn.Linear(width, width, bias=False), SwiGlu(width, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, gate = torch.chunk(self.q(y).view(*y.shape[:-1], self.count, -1), 2, dim=-1)
        k, v = heads(self.kv(y), 4).chunk(2, dim=1)
        q, k = rotate(self.q_norm(q).transpose(1, 2)), rotate(self.k_norm(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).flatten(2) * torch.sigmoid(gate.flatten(2))
        x = x + self.out(y)
        return x + self.mlp(x)


@odd(vector(12, 32))
class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values from a small latent, plus a rotary key shared by all heads."""

    def __init__(self, width: int = 32, count: int = 4, plain: int = 8, rotary: int = 4) -> None:
        super().__init__()
        self.count, self.plain, self.rotary = count, plain, rotary
        self.q_a, self.q_norm = nn.Linear(width, 16, bias=False), RmsNorm(16)
        self.q_b = nn.Linear(16, count * (plain + rotary), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(width, 16 + rotary, bias=False), RmsNorm(16)
        self.kv_b = nn.Linear(16, count * (plain + 8), bias=False)
        self.out = nn.Linear(count * 8, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        t = x.size(1)
        q = heads(self.q_b(self.q_norm(self.q_a(x))), self.count)
        q_plain, q_rotary = torch.split(q, [self.plain, self.rotary], dim=-1)
        latent, k_rotary = torch.split(self.kv_a(x), [16, self.rotary], dim=-1)
        k_plain, v = heads(self.kv_b(self.kv_norm(latent)), self.count).split([self.plain, 8], dim=-1)
        k_rotary = rotate(k_rotary.unsqueeze(1))
        query = q.new_empty(q.shape)
        query[..., : self.plain], query[..., self.plain :] = q_plain, rotate(q_rotary)
        key = torch.cat((k_plain, k_rotary.expand(-1, self.count, -1, -1)), dim=-1)
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.plain + self.rotary)
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@odd(vector(16, 32))
class SinkWindow(nn.Module):
    """Sliding-window attention with a learned sink: one extra logit per head, dropped after the softmax."""

    def __init__(self, width: int = 32, count: int = 4, window: int = 5) -> None:
        super().__init__()
        self.count, self.window = count, window
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.sinks = nn.Parameter(torch.randn(count))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (heads(part, self.count) for part in self.qkv(x).chunk(3, -1))
        place = torch.arange(t, device=x.device)
        distance = place[:, None] - place[None, :]
        allowed = (distance >= 0) & (distance < self.window)
        scores = torch.matmul(rotate(q), rotate(k).transpose(2, 3)) * (q.shape[-1] ** -0.5)
        scores = torch.where(allowed, scores, torch.finfo(scores.dtype).min)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, -1)
        combined = torch.cat([scores, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        probs = F.softmax(combined, dim=-1, dtype=torch.float32)[..., :-1].to(v.dtype)
        return self.out(torch.matmul(probs, v).transpose(1, 2).reshape(b, t, -1))


@odd(vector(12, 32))
class Differential(nn.Module):
    """Differential attention: a learned share of one softmax is subtracted from another; a norm per head."""

    def __init__(self, width: int = 32, count: int = 2, depth: int = 1) -> None:
        super().__init__()
        self.count, self.size = count, width // count // 2
        self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.lambdas = nn.ParameterList(nn.Parameter(torch.randn(self.size) * 0.1) for _ in range(4))
        self.norm = RmsNorm(2 * self.size)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.size()
        q = rotate(self.q(x).view(b, t, 2 * self.count, self.size).transpose(1, 2))
        k = rotate(self.k(x).view(b, t, 2 * self.count, self.size).transpose(1, 2))
        v = self.v(x).view(b, t, self.count, 2 * self.size).transpose(1, 2)
        scores = q * self.size**-0.5 @ k.transpose(-1, -2)
        scores = torch.nan_to_num(scores) + torch.triu(torch.full((t, t), float("-inf")), 1).type_as(scores)
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).view(b, self.count, 2, t, t)
        a1, b1, a2, b2 = self.lambdas
        share = torch.exp(torch.sum(a1 * b1, dim=-1)) - torch.exp(torch.sum(a2 * b2, dim=-1)) + self.start
        y = self.norm((probs[:, :, 0] - share * probs[:, :, 1]) @ v) * (1 - self.start)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


@odd(vector(16, 32))
class SparseBlocks(nn.Module):
    """Native sparse attention to means of blocks, to each query's two best blocks and to a window, mixed by gates."""

    def __init__(self, width: int = 32, count: int = 2, block: int = 4) -> None:
        super().__init__()
        self.count, self.block = count, block
        self.qkv, self.gates, self.out = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 3),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (heads(part, self.count) for part in self.qkv(x).chunk(3, -1))
        small_k, small_v = (
            one.reshape(b, self.count, t // self.block, self.block, -1).mean(3) for one in (k, v)
        )
        coarse = (q @ small_k.mT * q.shape[-1] ** -0.5).softmax(-1)
        chosen = coarse.sum(1).topk(2, dim=-1).indices
        picked = torch.zeros(b, t, t // self.block, device=x.device).scatter_(-1, chosen, 1.0)
        picked = picked.repeat_interleave(self.block, dim=-1).bool().unsqueeze(1)
        fine = F.scaled_dot_product_attention(q, k, v, attn_mask=picked)
        near = (torch.arange(t)[:, None] - torch.arange(t)).abs() < 3
        local = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        gates = self.gates(x).sigmoid()[:, None].unbind(-1)
        parts = (coarse @ small_v, fine, local)
        y = sum(gate.unsqueeze(-1) * part for gate, part in zip(gates, parts, strict=True))
        return self.out(y.transpose(1, 2).reshape(b, t, c))


@odd(vector(6, 16))
class BiasRouter(nn.Module):
    """Experts chosen in the best group by sigmoid scores with a balancing bias (all are computed); a shared expert."""

    def __init__(self, width: int = 16, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.chosen, self.experts = chosen, experts
        self.gate = nn.Parameter(torch.randn(experts, width) * 0.3)
        self.register_buffer("balance", torch.linspace(-0.1, 0.1, experts))
        self.balance: Tensor
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, width, 24) * 0.2),
            nn.Parameter(torch.randn(experts, 24, width) * 0.2),
        )
        self.shared = SwiGlu(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        flat = x.reshape(-1, c)
        scores = F.linear(flat, self.gate).sigmoid()
        biased = scores + self.balance
        groups = biased.view(-1, 2, self.experts // 2).topk(2, dim=-1)[0].sum(-1)
        best = torch.zeros_like(groups).scatter(1, groups.topk(1, dim=-1)[1], 1)
        allowed = best.unsqueeze(-1).expand(-1, 2, self.experts // 2).reshape(-1, self.experts)
        index = biased.masked_fill(~allowed.bool(), 0.0).topk(self.chosen, dim=-1, sorted=False)[1]
        weights = scores.gather(1, index)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
        dense = torch.zeros_like(scores).scatter_(1, index, weights)
        hidden = F.silu(torch.einsum("nc,ech->enh", flat, self.up))
        y = torch.einsum("enh,ehc,ne->nc", hidden, self.down, dense)
        return (y + self.shared(flat)).view(b, t, c)


@odd((tokens(50, 1), vector(2, 8, 8), vector(2, 8, 8)))
class CacheStep(nn.Module):
    """One decoding step: caches of keys and values are inputs, and outputs without the oldest step."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.norm, self.qkv = nn.Embedding(50, width), RmsNorm(width), nn.Linear(width, 3 * width)
        self.out, self.mlp = nn.Linear(width, width), SwiGlu(width, 32)

    def forward(self, ids: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(ids)
        q, k, v = (heads(part, 2) for part in self.qkv(self.norm(x)).split(16, dim=-1))
        q, k = rotate(q, keys.size(2)), rotate(k, keys.size(2))
        keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        y = F.scaled_dot_product_attention(q, keys, values)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.mlp(x)
        return F.linear(x, self.embed.weight), keys[:, :, 1:], values[:, :, 1:]


@odd((vector(1, 16), vector(2, 8, 8), fixed(torch.tensor([3]))))
class StaticCache(nn.Module):
    """A decoding step that writes its key into a cache of fixed size, at a position that is an input."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, cache: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        q, k = heads(self.q(x), 2), heads(self.k(x), 2)
        cache = cache.index_copy(2, position, k)
        seen = torch.arange(cache.size(2)) <= position
        y = F.scaled_dot_product_attention(q, cache, cache, attn_mask=seen[None, None, None])
        return self.out(y.transpose(1, 2).flatten(2)), cache


@odd(vector(8, 16))
class HyperConnections(nn.Module):
    """Residual streams, mixed by input-dependent matrices that Sinkhorn steps make doubly stochastic."""

    def __init__(self, width: int = 16, streams: int = 4) -> None:
        super().__init__()
        self.start, self.blocks = (
            nn.Parameter(torch.rand(streams, 1)),
            nn.ModuleList(SwiGlu(width, 32) for _ in range(2)),
        )
        self.norms = nn.ModuleList(RmsNorm(width) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Linear(streams * width, streams * streams) for _ in range(2))
        self.ins = nn.ParameterList(nn.Parameter(torch.randn(streams)) for _ in range(2))
        self.outs = nn.ParameterList(nn.Parameter(torch.randn(streams)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        streams = x.unsqueeze(2) * self.start
        layers = zip(self.blocks, self.norms, self.mixes, self.ins, self.outs, strict=True)
        for block, norm, mix, weight, spread in layers:
            matrix = torch.exp(torch.tanh(mix(streams.flatten(2)))).unflatten(-1, (len(self.start), -1))
            for _ in range(3):
                matrix = matrix / matrix.sum(-1, keepdim=True)
                matrix = matrix / matrix.sum(-2, keepdim=True)
            y = block(norm(torch.einsum("btsc,s->btc", streams, weight.softmax(0))))
            streams = matrix @ streams + 2 * spread.sigmoid()[:, None] * y[:, :, None]
        return streams.mean(2)


class DynamicTanhNorm(nn.Module):
    """`weight * tanh(alpha * x) + bias` in place of a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1) * 0.5)
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.bias


@odd(vector(10, 32))
class DynamicTanh(nn.Module):
    """A transformer block with dynamic tanh instead of LayerNorm, and squared ReLU in the feed-forward layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.one, self.two = DynamicTanhNorm(width), DynamicTanhNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.relu(self.up(self.two(x))).square())


@odd(tokens(60, 14))
class Canon(nn.Module):
    """Canon layers: causal depthwise convolutions over 4 steps with a residual, before and inside attention."""

    class Layer(nn.Conv1d):
        """The convolution with its residual, over [batch, time, channels]."""

        def __init__(self, width: int) -> None:
            super().__init__(width, width, 4, padding=3, groups=width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x.transpose(1, 2))[..., : x.size(1)]
            return x + y.transpose(1, 2)

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(60, width), self.Layer(width), self.Layer(3 * width)
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), RmsNorm(width)
        self.head = nn.Linear(width, 60, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.a(self.norm(self.embed(ids)))
        q, k, v = self.b(self.qkv(x)).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return 30.0 * torch.tanh(self.head(x + self.out(y.transpose(1, 2).flatten(-2))) / 30.0)
