"""More layers of papers: stereo, DETR, normalizing flows, state spaces, graphs, points, audio."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


@odd((image(3, 16, 32), image(3, 16, 32)))
class StereoVolume(nn.Module):
    """Stereo matching: a cost volume written shift by shift, 3-D convolutions, a soft argmin of disparities."""

    def __init__(self, disparities: int = 4) -> None:
        super().__init__()
        self.disparities, self.features = disparities, body(8)
        self.aggregate = nn.Sequential(
            nn.Conv3d(16, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(True), nn.Conv3d(8, 1, 3, padding=1)
        )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = self.features(left), self.features(right)
        b, c, h, w = left.size()
        cost = torch.FloatTensor(b, c * 2, self.disparities, h, w).zero_().to(left.device)
        for i in range(self.disparities):
            if i > 0:
                cost[:, :c, i, :, i:] = left[:, :, :, i:]
                cost[:, c:, i, :, i:] = right[:, :, :, :-i]
            else:
                cost[:, :c, i, :, :], cost[:, c:, i, :, :] = left, right
        cost = self.aggregate(cost.contiguous()).squeeze(1)
        cost = F.interpolate(
            cost[:, None], [self.disparities, h * 4, w * 4], mode="trilinear", align_corners=False
        )
        values = torch.arange(self.disparities, dtype=torch.float32).view(1, -1, 1, 1)
        return torch.sum(F.softmax(-cost.squeeze(1), dim=1) * values, 1)


class _Mlp(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.num_layers = len(sizes) - 1
        self.layers = nn.ModuleList(nn.Linear(n, k) for n, k in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < self.num_layers - 1 else layer(x)
        return x


@odd(image(3, 32, 32))
class Detr(nn.Module):
    """DETR: positions from cumulative sums of a mask, nn.Transformer, and a nested dict of outputs."""

    def __init__(self, width: int = 16, queries: int = 5) -> None:
        super().__init__()
        self.width, self.body, self.proj = width, body(16), nn.Conv2d(16, width, 1)
        self.transformer = nn.Transformer(width, 2, 1, 2, 32, batch_first=False)
        self.query_embed, self.class_embed = nn.Embedding(queries, width), nn.Linear(width, 4)
        self.bbox_embed = _Mlp(width, width, 4)

    def positions(self, x: Tensor) -> Tensor:
        mask = torch.zeros((x.shape[0], *x.shape[-2:]), dtype=torch.bool, device=x.device)
        y_embed, x_embed = (~mask).cumsum(1, dtype=torch.float32), (~mask).cumsum(2, dtype=torch.float32)
        y_embed = y_embed / (y_embed[:, -1:, :] + 1e-6) * 2 * math.pi
        x_embed = x_embed / (x_embed[:, :, -1:] + 1e-6) * 2 * math.pi
        half = self.width // 2
        dim_t = torch.arange(half, dtype=torch.float32, device=x.device)
        dim_t = 10000 ** (2 * torch.div(dim_t, 2, rounding_mode="floor") / half)
        parts = []
        for embed in (y_embed, x_embed):
            p = embed[:, :, :, None] / dim_t
            parts.append(torch.stack((p[:, :, :, 0::2].sin(), p[:, :, :, 1::2].cos()), dim=4).flatten(3))
        return torch.cat(parts, dim=3).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.proj(self.body(x))
        source = (x + self.positions(x)).flatten(2).permute(2, 0, 1)
        queries = self.query_embed.weight.unsqueeze(1).repeat(1, x.shape[0], 1)
        hs = self.transformer(source, queries).transpose(0, 1)
        classes, boxes = self.class_embed(hs), self.bbox_embed(hs).sigmoid()
        return {"pred_logits": classes, "pred_boxes": boxes, "aux_outputs": [{"logits": classes[:, :2]}]}


class _Coupling(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.mask: Tensor
        self.s = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6), nn.Tanh())
        self.t = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        kept = x * self.mask
        s, t = self.s(kept) * (1 - self.mask), self.t(kept) * (1 - self.mask)
        return kept + (1 - self.mask) * (x * s.exp() + t), log_det + s.sum(dim=1)


@odd(vector(6))
class RealNvp(nn.Module):
    """Coupling layers with masks, an invertible matrix from an LU decomposition, and the log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        even = (torch.arange(6) % 2).float()
        self.flows = nn.ModuleList(_Coupling(m) for m in (even, 1 - even, even))
        p, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(6, 6))[0])
        self.register_buffer("p", p)
        self.register_buffer("eye", torch.eye(6))
        self.register_buffer("l_mask", torch.tril(torch.ones(6, 6), -1))
        self.lower, self.log_s = nn.Parameter(lower), nn.Parameter(torch.log(upper.diag().abs()))
        self.register_buffer("sign_s", torch.sign(upper.diag()))
        self.upper = nn.Parameter(torch.triu(upper, 1))
        self.p: Tensor
        self.eye: Tensor
        self.l_mask: Tensor
        self.sign_s: Tensor

    def weight(self) -> Tensor:
        lower = self.lower * self.l_mask + self.eye
        upper = self.upper * self.l_mask.t() + torch.diag(self.sign_s * torch.exp(self.log_s))
        return self.p @ (lower @ upper)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros(x.shape[0], device=x.device)
        x = F.linear(x, self.weight())
        for flow in self.flows:
            x, log_det = flow(x, log_det)
        return x, log_det + self.log_s.sum()


@odd(image(3, 16, 16))
class GlowStep(nn.Module):
    """A Glow step: squeeze, actnorm, an invertible 1x1 convolution with an unsqueezed matrix, a coupling."""

    def __init__(self) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(1, 12, 1, 1)), nn.Parameter(torch.ones(1, 12, 1, 1))
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(12, 12))[0])
        self.net = nn.Sequential(
            nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 1), nn.ReLU(inplace=True)
        )
        self.last, self.gain = nn.Conv2d(16, 12, 3), nn.Parameter(torch.zeros(1, 12, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, c, h, w = x.shape
        x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
        x = x.contiguous().view(b, c * 4, h // 2, w // 2)
        x = F.conv2d(self.scale * (x + self.loc), self.weight.unsqueeze(2).unsqueeze(3))
        a, rest = x.chunk(2, 1)
        out = self.last(F.pad(self.net(a), [1, 1, 1, 1], value=1)) * torch.exp(self.gain * 3)
        log_s, t = out.chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        return torch.cat([a, (rest + t) * s], 1), torch.sum(torch.log(s).view(b, -1), 1)


@odd(vector(16, 4))
class StateSpaceConv(nn.Module):
    """S4D as a convolution: `F.conv1d` with groups and a kernel computed from decays."""

    def __init__(self, width: int = 8, states: int = 4) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, width), nn.Linear(width, 2)
        self.log_dt, self.c = nn.Parameter(torch.rand(width) - 2), nn.Parameter(torch.randn(width, states))
        self.log_a, self.skip = nn.Parameter(torch.rand(width, states)), nn.Parameter(torch.randn(width))

    def kernel(self, length: int) -> Tensor:
        dt_a = -torch.exp(self.log_a) * torch.exp(self.log_dt)[:, None]
        powers = torch.exp(dt_a[..., None] * torch.arange(length))
        return torch.einsum("hn,hnl->hl", self.c * (torch.exp(dt_a) - 1.0), powers)

    def forward(self, u: Tensor) -> Tensor:
        u = self.encoder(u).transpose(-1, -2)
        length = u.size(-1)
        k = self.kernel(length).flip(-1).unsqueeze(1)
        y = F.conv1d(F.pad(u, (length - 1, 0)), k, groups=u.size(1)) + u * self.skip[:, None]
        return self.decoder(F.gelu(y).transpose(-1, -2)).mean(1)


@odd((vector(10, 6), vector(10, 10)))
class GraphAttention(nn.Module):
    """GAT with dense adjacency (scores of -9e15 where there is no edge), then a GCN normalized by node degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.empty(6, 12)), nn.Parameter(torch.empty(24, 1))
        nn.init.xavier_uniform_(self.w, gain=1.414)
        nn.init.xavier_uniform_(self.a, gain=1.414)
        self.gcn, self.head = nn.Linear(12, 12, bias=False), nn.Linear(12, 3)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        adj = (adj > 0.3).float()
        adj = torch.maximum(adj, adj.transpose(1, 2))
        adj.diagonal(dim1=1, dim2=2).fill_(1.0)
        wh = torch.matmul(x, self.w)
        e = torch.matmul(wh, self.a[:12, :]) + torch.matmul(wh, self.a[12:, :]).transpose(1, 2)
        e = F.leaky_relu(e, 0.2)
        attention = torch.where(adj > 0, e, -9e15 * torch.ones_like(e))
        h = F.elu(torch.matmul(F.dropout(F.softmax(attention, dim=-1), 0.6, training=self.training), wh))
        d_inv = adj.sum(1).pow(-0.5)
        d_inv[torch.isinf(d_inv)] = 0.0
        norm = d_inv.unsqueeze(-1) * adj * d_inv.unsqueeze(-2)
        return F.log_softmax(self.head(F.relu(norm @ self.gcn(h))), dim=-1)


def _knn(x: Tensor, k: int) -> Tensor:
    inner = -2 * torch.matmul(x.transpose(2, 1), x)
    xx = torch.sum(x**2, dim=1, keepdim=True)
    return (-xx - inner - xx.transpose(2, 1)).topk(k=k, dim=-1)[1]


@odd(vector(3, 24))
class DgCnn(nn.Module):
    """EdgeConv: neighbours by top-k, gathered with an index that is flattened over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(6, 16, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2))
        self.linear = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        batch, dims, points = x.size()
        idx = _knn(x, 6)
        idx_base = torch.arange(0, batch, device=x.device).view(-1, 1, 1) * points
        idx = (idx + idx_base).view(-1)
        flat = x.transpose(2, 1).contiguous()
        feature = flat.view(batch * points, -1)[idx, :].view(batch, points, 6, dims)
        centre = flat.view(batch, points, 1, dims).repeat(1, 1, 6, 1)
        feature = torch.cat((feature - centre, centre), dim=3).permute(0, 3, 1, 2).contiguous()
        x = self.conv(feature).max(dim=-1, keepdim=False)[0]
        pooled = (F.adaptive_max_pool1d(x, 1).view(batch, -1), F.adaptive_avg_pool1d(x, 1).view(batch, -1))
        return self.linear(torch.cat(pooled, 1))


@odd(vector(24, 3))
class FarthestPoints(nn.Module):
    """PointNet++: farthest points by a loop of argmax, groups by distance; indices of points too far are replaced."""

    def __init__(self, points: int = 6, near: int = 4) -> None:
        super().__init__()
        self.points, self.near = points, near
        self.mlp = nn.Sequential(
            nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU()
        )
        self.head = nn.Linear(16, 4)

    def farthest(self, xyz: Tensor) -> Tensor:
        b, n, _ = xyz.shape
        centroids = torch.zeros(b, self.points, dtype=torch.long)
        distance = torch.ones(b, n) * 1e10
        farthest = torch.zeros(b, dtype=torch.long)
        batch_indices = torch.arange(b, dtype=torch.long)
        for i in range(self.points):
            centroids[:, i] = farthest
            centroid = xyz[batch_indices, farthest, :].view(b, 1, 3)
            dist = torch.sum((xyz - centroid) ** 2, -1)
            mask = dist < distance
            distance[mask] = dist[mask]
            farthest = torch.max(distance, -1)[1]
        return centroids

    def forward(self, xyz: Tensor) -> Tensor:
        b, n, _ = xyz.shape
        rows = torch.arange(b).view(b, 1)
        centres = xyz[rows, self.farthest(xyz)]
        squared = ((centres[:, :, None] - xyz[:, None]) ** 2).sum(-1)
        group = torch.arange(n, dtype=torch.long).view(1, 1, n).repeat([b, self.points, 1])
        group[squared > 4.0] = n
        group = group.sort(dim=-1)[0][:, :, : self.near]
        first = group[:, :, 0].view(b, self.points, 1).repeat([1, 1, self.near])
        mask = group == n
        group[mask] = first[mask]
        grouped = xyz[rows.unsqueeze(-1), group] - centres.unsqueeze(2)
        return self.head(self.mlp(grouped.permute(0, 3, 2, 1)).amax(2).mean(2))


@odd(vector(1, 256))
class SincNet(nn.Module):
    """SincNet: band-pass filters, each computed from two cut-off frequencies, then a plain 1-D network."""

    def __init__(self, filters: int = 8, size: int = 31) -> None:
        super().__init__()
        self.size = size
        self.low, self.band = (
            nn.Parameter(torch.linspace(30, 3000, filters)[:, None]),
            nn.Parameter(torch.full((filters, 1), 300.0)),
        )
        n = torch.arange(-(size - 1) / 2, 0).view(1, -1) / 8000 * 2 * math.pi
        self.register_buffer("n_", n)
        self.register_buffer("window_", 0.54 - 0.46 * torch.cos(torch.linspace(0, math.pi, size // 2)))
        self.n_: Tensor
        self.window_: Tensor
        self.conv, self.norm = nn.Conv1d(filters, 16, 5, stride=2), nn.GroupNorm(1, 16)
        self.head = nn.Linear(16, 4)

    def filters(self) -> Tensor:
        low = 50 + torch.abs(self.low)
        high = torch.clamp(low + 50 + torch.abs(self.band), 50, 4000)
        band = (high - low)[:, 0]
        low_pass, high_pass = torch.matmul(low, self.n_), torch.matmul(high, self.n_)
        left = ((torch.sin(high_pass) - torch.sin(low_pass)) / (self.n_ / 2)) * self.window_
        filters = torch.cat([left, 2 * band.view(-1, 1), torch.flip(left, dims=[1])], dim=1)
        return (filters / (2 * band[:, None])).view(-1, 1, self.size)

    def forward(self, waveform: Tensor) -> Tensor:
        x = torch.abs(F.conv1d(waveform, self.filters(), stride=2, padding=0, bias=None))
        x = F.leaky_relu(self.norm(self.conv(F.max_pool1d(x, 3))))
        return self.head(x.mean(-1))
