"""Time series, graph and tabular models of 2023 to 2026: mixers, and transformers over variates, rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, fixed, tokens, vector

odd = List("odd")
ENTRIES = odd.entries


@odd(vector(24, 5))
class TsMixer(nn.Module):
    """TSMixer: MLPs over time and over features, and reversible normalization with learned parameters."""

    def __init__(self, length: int = 24, features: int = 5, horizon: int = 6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.norm1, self.norm2 = nn.BatchNorm1d(length * features), nn.BatchNorm1d(length * features)
        self.time, self.up, self.down = (
            nn.Linear(length, length),
            nn.Linear(features, 16),
            nn.Linear(16, features),
        )
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(length, horizon)

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(x, dim=1, keepdim=True).detach()
        std = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        x = (x - mean) / std * self.weight + self.bias
        y = self.norm1(torch.flatten(x, 1, -1)).reshape(x.shape)
        x = x + self.drop(F.relu(self.time(torch.transpose(y, 1, 2)))).transpose(1, 2)
        y = self.norm2(torch.flatten(x, 1, -1)).reshape(x.shape)
        x = x + self.drop(self.down(self.drop(F.relu(self.up(y)))))
        y = self.head(x.transpose(1, 2)).transpose(1, 2)
        return (y - self.bias) / (self.weight + 1e-10) * std + mean


@odd((vector(24, 4), vector(24, 2)))
class InvertedTransformer(nn.Module):
    """iTransformer: one token per variate and time feature, attention between them, statistics restored at the end."""

    def __init__(self, length: int = 24, width: int = 32, horizon: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 48, 0.1, "gelu", batch_first=True)
        self.encoder, self.head = (
            nn.TransformerEncoder(layer, 2, nn.LayerNorm(width)),
            nn.Linear(width, horizon),
        )

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        means = x.mean(1, keepdim=True).detach()
        x = x - means
        stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x /= stdev
        n = x.shape[2]
        tokens = self.embed(torch.cat([x.permute(0, 2, 1), marks.permute(0, 2, 1)], 1))
        y = self.head(self.encoder(tokens)).permute(0, 2, 1)[:, :, :n]
        y = y * (stdev[:, 0, :].unsqueeze(1).repeat(1, y.shape[1], 1))
        return y + (means[:, 0, :].unsqueeze(1).repeat(1, y.shape[1], 1))


@odd(vector(32, 3))
class TimeMixer(nn.Module):
    """TimeMixer: pooled scales, seasons mixed fine to coarse and trends coarse to fine, one head per scale."""

    def __init__(self, length: int = 32, horizon: int = 8) -> None:
        super().__init__()
        sizes = [length, length // 2, length // 4]
        self.pool, self.average = nn.AvgPool1d(2), nn.AvgPool1d(5, 1)
        self.finer = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, b))
            for a, b in ((sizes[0], sizes[1]), (sizes[1], sizes[2]))
        )
        self.coarser = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, b))
            for a, b in ((sizes[2], sizes[1]), (sizes[1], sizes[0]))
        )
        self.heads = nn.ModuleList(nn.Linear(size, horizon) for size in sizes)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the season and the trend, a moving average for which both ends are repeated."""
        trend = self.average(torch.cat([x[..., :1].repeat(1, 1, 2), x, x[..., -1:].repeat(1, 1, 2)], -1))
        return x - trend, trend

    def forward(self, x: Tensor) -> Tensor:
        scales = [x.permute(0, 2, 1)]
        for _ in range(2):
            scales.append(self.pool(scales[-1]))
        seasons, trends = map(list, zip(*(self.split(one) for one in scales), strict=True))
        for i, layer in enumerate(self.finer):
            seasons[i + 1] = seasons[i + 1] + layer(seasons[i])
        trends.reverse()
        for i, layer in enumerate(self.coarser):
            trends[i + 1] = trends[i + 1] + layer(trends[i])
        trends.reverse()
        outs = [head(s + t) for head, s, t in zip(self.heads, seasons, trends, strict=True)]
        return torch.stack(outs, dim=-1).sum(-1).permute(0, 2, 1)


@odd((tokens(6, 10), fixed(torch.randint(0, 5, (10, 10), generator=torch.Generator().manual_seed(3)))))
class GraphTransformer(nn.Module):
    """Graphormer: attention biases looked up by distances between nodes, a degree encoding, a virtual node."""

    def __init__(self, width: int = 16, count: int = 2) -> None:
        super().__init__()
        self.count, self.node, self.degree = count, nn.Embedding(6, width), nn.Embedding(12, width)
        self.distance, self.token = nn.Embedding(5, count), nn.Parameter(torch.randn(1, 1, width))
        self.virtual, self.norm = nn.Parameter(torch.randn(count)), nn.LayerNorm(width)
        self.qkv, self.out, self.head = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Linear(width, 3),
        )

    def forward(self, kinds: Tensor, distances: Tensor) -> Tensor:
        b, n = kinds.shape
        x = self.node(kinds) + self.degree((distances == 1).sum(-1))
        x = torch.cat([self.token.expand(b, -1, -1), x], dim=1)
        bias = torch.zeros(self.count, n + 1, n + 1)
        bias[:, 1:, 1:] = self.distance(distances).permute(2, 0, 1)
        bias[:, 0, :] += self.virtual.view(-1, 1)
        bias[:, 1:, 0] += self.virtual.view(-1, 1)
        q, k, v = self.qkv(self.norm(x)).view(b, n + 1, 3, self.count, -1).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 8**0.5 + bias
        y = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v).reshape(b, n + 1, -1)
        return self.head((x + self.out(y))[:, 0])


@odd((vector(6), tokens(4, 3)))
class FtTransformer(nn.Module):
    """FT-Transformer: one token per feature (piecewise-linear bins), categories with offsets, ReGLU."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("edges", torch.linspace(-2, 2, 6))
        self.register_buffer("offsets", torch.tensor([0, 4, 8]))
        self.edges: Tensor
        self.offsets: Tensor
        self.weight, self.bias = (
            nn.Parameter(torch.randn(6, 5, width) * 0.3),
            nn.Parameter(torch.randn(6, width) * 0.1),
        )
        self.categories, self.cls = nn.Embedding(12, width), nn.Parameter(torch.randn(width))
        self.attention, self.norm1 = nn.MultiheadAttention(width, 2, batch_first=True), nn.LayerNorm(width)
        self.up, self.down, self.norm2, self.head = (
            nn.Linear(width, 48),
            nn.Linear(24, width),
            nn.LayerNorm(width),
            nn.Linear(width, 3),
        )

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        bins = ((numbers[..., None] - self.edges[:-1]) / self.edges.diff()).clamp(0.0, 1.0)
        x = torch.einsum("bfk,fkd->bfd", bins, self.weight) + self.bias
        cls = self.cls.view(1, 1, -1).expand(len(numbers), 1, -1)
        x = torch.cat([cls, x, self.categories(categories + self.offsets[None])], dim=1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y)[0]
        a, b = self.up(self.norm2(x)).chunk(2, dim=-1)
        return self.head((x + self.down(a * F.relu(b)))[:, 0])


@odd((vector(12, 4), vector(8)))
class InContextTable(nn.Module):
    """TabPFN: attention between the features of a row, then between rows; all rows attend only to training rows."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.x, self.y, self.missing = (
            nn.Linear(1, width),
            nn.Linear(1, width),
            nn.Parameter(torch.randn(width)),
        )
        self.columns, self.rows = (nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2))
        self.norms, self.mlp = (
            nn.ModuleList(nn.LayerNorm(width) for _ in range(3)),
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)),
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, n, f = x.shape
        seen = y.shape[1]
        std, mean = torch.std_mean(x[:, :seen], dim=1, keepdim=True)
        cells = self.x(((x - mean) / (std + 1e-6)).unsqueeze(-1))
        target = torch.cat([self.y(y.unsqueeze(-1)), self.missing.expand(b, n - seen, -1)], dim=1)
        h = torch.cat([cells, target.unsqueeze(2)], dim=2)
        flat = h.reshape(b * n, f + 1, -1)
        h = self.norms[0](flat + self.columns(flat, flat, flat, need_weights=False)[0]).view(b, n, f + 1, -1)
        flat = h.transpose(1, 2).reshape(b * (f + 1), n, -1)
        known = flat[:, :seen]
        both = [self.rows(part, known, known, need_weights=False)[0] for part in (known, flat[:, seen:])]
        flat = self.norms[1](flat + torch.cat(both, dim=1))
        h = flat.view(b, f + 1, n, -1).transpose(1, 2)
        return self.head(self.norms[2](h + self.mlp(h))[:, seen:, -1])


@odd(vector(8))
class TabularEnsemble(nn.Module):
    """TabM: an ensemble in one MLP, whose members share the Linears.

    Each member scales the inputs and outputs of the first one by its own vectors, and has its own head.
    """

    def __init__(self, members: int = 4, width: int = 24) -> None:
        super().__init__()
        self.r, self.s = (
            nn.Parameter(torch.randn(members, 8).sign()),
            nn.Parameter(torch.ones(members, width)),
        )
        self.bias, self.first = nn.Parameter(torch.zeros(members, width)), nn.Linear(8, width, bias=False)
        self.second, self.members = nn.Linear(width, width), members
        self.head = nn.Parameter(torch.randn(members, width, 3) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-2).expand(-1, self.members, -1)
        x = F.relu(self.first(x * self.r) * self.s + self.bias)
        x = F.relu(self.second(x))
        return torch.bmm(x.transpose(0, 1), self.head).transpose(0, 1).softmax(-1).mean(1)


@odd(vector(6))
class SplineNetwork(nn.Module):
    """KAN with B-splines: bases by the Cox-de Boor recursion over a grid, in parallel with a SiLU branch."""

    class Layer(nn.Module):
        """One layer of splines from `inputs` to `outputs`."""

        def __init__(self, inputs: int, outputs: int, grid: int = 4, order: int = 3) -> None:
            super().__init__()
            self.order, self.base = order, nn.Linear(inputs, outputs, bias=False)
            knots = torch.arange(-order, grid + order + 1) * (2.0 / grid) - 1.0
            self.register_buffer("grid", knots.expand(inputs, -1).contiguous())
            self.grid: Tensor
            self.spline = nn.Parameter(torch.randn(outputs, inputs, grid + order) * 0.3)
            self.scaler = nn.Parameter(torch.ones(outputs, inputs))

        def forward(self, x: Tensor) -> Tensor:
            base, x, g = self.base(F.silu(x)), x.unsqueeze(-1), self.grid
            bases = ((x >= g[:, :-1]) & (x < g[:, 1:])).to(x.dtype)
            for k in range(1, self.order + 1):
                rise = (x - g[:, : -(k + 1)]) / (g[:, k:-1] - g[:, : -(k + 1)]) * bases[:, :, :-1]
                fall = (g[:, k + 1 :] - x) / (g[:, k + 1 :] - g[:, 1:(-k)]) * bases[:, :, 1:]
                bases = rise + fall
            weight = (self.spline * self.scaler.unsqueeze(-1)).view(base.shape[-1], -1)
            return base + F.linear(bases.view(x.size(0), -1), weight)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(6, 12), self.Layer(12, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return x
