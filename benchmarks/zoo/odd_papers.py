"""Models of papers and products: super-resolution, poses, recommenders, forecasting, speech, wavelets, policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, mask, tokens, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


class _MeanShift(nn.Conv2d):
    """The mean shift of EDSR: a 1x1 convolution with the identity as its weight, never trained."""

    def __init__(self, sign: int) -> None:
        super().__init__(3, 3, kernel_size=1)
        self.weight.data = torch.eye(3).view(3, 3, 1, 1)
        self.bias = nn.Parameter(sign * torch.tensor([0.45, 0.44, 0.40]))
        for p in self.parameters():
            p.requires_grad = False


class _ChannelAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.conv_du = nn.Sequential(
            nn.Conv2d(width, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, width, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv_du(self.avg_pool(x))


@odd(image(3, 16, 16))
class SuperResolution(nn.Module):
    """RCAN: mean shifts, residual groups scaled by 0.1, channel attention, pixel shuffle, a bicubic shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.sub_mean, self.add_mean = _MeanShift(-1), _MeanShift(1)
        self.head = nn.Conv2d(3, 16, 3, padding=1)
        self.groups = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1),
                nn.PReLU(16),
                nn.Conv2d(16, 16, 3, 1, 1),
                _ChannelAttention(16),
            )
            for _ in range(2)
        )
        self.tail = nn.Sequential(nn.Conv2d(16, 48, 3, padding=1), nn.PixelShuffle(4))

    def forward(self, x: Tensor) -> Tensor:
        up = F.interpolate(x, scale_factor=4, mode="bicubic", align_corners=False)
        x = self.head(self.sub_mean(x))
        res = x
        for group in self.groups:
            res = res + group(res).mul(0.1)
        return self.add_mean(self.tail(res + x)).add_(up).clamp(-3, 3)


class _Hourglass(nn.Module):
    def __init__(self, depth: int, width: int = 16) -> None:
        super().__init__()
        self.up1, self.low1 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.low2 = _Hourglass(depth - 1) if depth > 1 else nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low2(F.relu(self.low1(F.max_pool2d(x, 2, stride=2))))
        return F.relu(self.up1(x)) + F.interpolate(low, size=x.shape[-2:])


@odd(image(3, 32, 32))
class Hourglasses(nn.Module):
    """Stacked hourglasses: a list of heat maps, each fed into the next stack, and a soft argmax of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()
        self.stacks = nn.ModuleList(_Hourglass(2) for _ in range(2))
        self.maps = nn.ModuleList(nn.Conv2d(16, 4, 1) for _ in range(2))
        self.back = nn.ModuleList(nn.Conv2d(4, 16, 1) for _ in range(1))

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        x, maps = self.body(x), []
        for i, (stack, head) in enumerate(zip(self.stacks, self.maps, strict=True)):
            y = stack(x)
            maps.append(head(y))
            if i < len(self.back):
                x = x + y + self.back[i](maps[-1])
        n, k, h, w = maps[-1].shape
        prob = (maps[-1].reshape(n, k, -1) * 2.0).softmax(-1).reshape(n, k, h, w)
        xs = (prob.sum(2) * torch.arange(w).float()).sum(-1)
        ys = (prob.sum(3) * torch.arange(h).to(prob.dtype)).sum(-1)
        return maps, torch.stack((xs / (w - 1), ys / (h - 1)), -1)


@odd((vector(5), tokens(20, 4)))
class Dlrm(nn.Module):
    """DLRM: embeddings, an MLP, dot products of pairs by triangle indices, and DeepFM's factorization machine."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 10 + 8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        embedded = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        t = torch.cat([x, *embedded], dim=1).view((x.shape[0], -1, x.shape[1]))
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        _, ni, nj = z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        stacked = torch.stack(embedded, 1)
        fm = 0.5 * (stacked.sum(1).square() - stacked.square().sum(1))
        return torch.sigmoid(self.top(torch.cat([x, z[:, li, lj], fm], dim=1))).squeeze(-1)


class _Block(nn.Module):
    def __init__(self, size: int, horizon: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(size, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.theta = nn.Linear(24, 8, bias=False)
        back, ahead = torch.linspace(-1, 0, size), torch.linspace(0, 1, horizon)
        self.register_buffer("back", torch.stack([back**i for i in range(4)]), persistent=False)
        self.register_buffer("ahead", torch.stack([ahead**i for i in range(4)]), persistent=False)
        self.back: Tensor
        self.ahead: Tensor

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        theta = self.theta(self.fc(x))
        return theta[:, 4:].mm(self.back), theta[:, :4].mm(self.ahead)


@odd(vector(24))
class NBeats(nn.Module):
    """N-BEATS: blocks that subtract what they explain, polynomial bases as buffers, per-series normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(24, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = (
            x.mean(dim=-1, keepdim=True).detach(),
            torch.sqrt(torch.var(x, -1, keepdim=True) + 1e-5).detach(),
        )
        residual, forecast = (x - mean) / std, x.new_zeros((x.size(0), 6))
        for block in self.blocks:
            backcast, ahead = block(residual)
            residual, forecast = residual - backcast, forecast + ahead
        return forecast * std + mean


@odd({"input_ids": tokens(40, 10), "attention_mask": mask(10)})
class SentenceEncoder(nn.Module):
    """A sentence encoder: encoder layers with a padding mask, mean pooling over the tokens, unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(40, 16, padding_idx=0), nn.Embedding(12, 16)
        self.register_buffer("position_ids", torch.arange(12).expand((1, -1)))
        self.position_ids: Tensor
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        seq_length = input_ids.size()[1]
        x = self.embed(input_ids) + self.position(self.position_ids[:, :seq_length])
        padded = attention_mask.eq(0) if attention_mask is not None else None
        x = self.norm(self.encoder(x, src_key_padding_mask=padded))
        assert attention_mask is not None
        weight = attention_mask.unsqueeze(-1).expand(x.size()).float()
        pooled = torch.sum(x * weight, 1) / torch.clamp(weight.sum(1), min=1e-9)
        return {"embedding": F.normalize(pooled, p=2, dim=1), "length": seq_length}


@odd(vector(1, 320))
class SpeechRecognizer(nn.Module):
    """wav2vec 2.0 with an LSTM and a CTC head: strided and positional convolutions, the latter with weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv1d(1, 16, 10, 5, bias=False), nn.GroupNorm(16, 16), nn.GELU(),
            nn.Conv1d(16, 16, 3, 2, bias=False), nn.GELU(), nn.Conv1d(16, 16, 2, 2, bias=False), nn.GELU(),
        )  # fmt: skip
        self.norm, self.proj = nn.LayerNorm(16), nn.Linear(16, 24)
        conv = nn.Conv1d(24, 24, 8, padding=4, groups=4)
        self.pos = nn.utils.parametrizations.weight_norm(conv, dim=2)
        self.rnn = nn.LSTM(24, 12, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 9)

    def forward(self, wave: Tensor) -> Tensor:
        wave = (wave - wave.mean(-1, keepdim=True)) / (wave.std(-1, keepdim=True) + 1e-7)
        x = self.proj(self.norm(self.convs(wave).transpose(1, 2)))
        x = x + F.gelu(self.pos(x.transpose(1, 2))[:, :, :-1]).transpose(1, 2)
        x, _ = self.rnn(x)
        return F.log_softmax(self.head(x), dim=-1).permute(1, 0, 2)


@odd((vector(6, 8), vector(8), vector(8)))
class RecurrentPolicy(nn.Module):
    """A policy over a window of observations: noisy weights only in training, state in and out, several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mu, self.sigma = nn.Parameter(torch.randn(8, 8) * 0.3), nn.Parameter(torch.full((8, 8), 0.02))
        self.register_buffer("epsilon", torch.randn(8, 8))
        self.epsilon: Tensor
        self.cell, self.actor, self.critic = nn.LSTMCell(8, 8), nn.Linear(8, 4), nn.Linear(8, 1)
        self.advantage, self.log_std = nn.Linear(8, 4), nn.Parameter(torch.zeros(1, 4))

    def forward(self, obs: Tensor, h: Tensor, c: Tensor) -> dict[str, Any]:
        weight = self.mu + self.sigma * self.epsilon if self.training else self.mu
        for t in range(obs.shape[1]):
            h, c = self.cell(torch.tanh(F.linear(obs[:, t], weight)), (h, c))
        advantage = self.advantage(h)
        q = self.critic(h) + advantage - advantage.mean(1, keepdim=True)
        std = self.log_std.expand_as(advantage).exp()
        return {"action": (self.actor(h).tanh(), std), "q": q, "state": [h, c]}


@odd(image(3, 32, 32))
class WaveletUnet(nn.Module):
    """Haar wavelets by strided slices, a convolution, and the inverse by writing into slices of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Conv2d(12, 12, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x01, x02 = x[:, :, 0::2, :] / 2, x[:, :, 1::2, :] / 2
        x1, x2, x3, x4 = x01[:, :, :, 0::2], x02[:, :, :, 0::2], x01[:, :, :, 1::2], x02[:, :, :, 1::2]
        y = torch.cat((x1 + x2 + x3 + x4, -x1 - x3 + x2 + x4, -x1 + x3 - x2 + x4, x1 - x3 - x2 + x4), 1)
        y = self.inner(y)
        n, c, h, w = y.size()
        a, b, d, e = (y[:, i * (c // 4) : (i + 1) * (c // 4)] / 2 for i in range(4))
        out = torch.zeros([n, c // 4, 2 * h, 2 * w]).float().to(x.device)
        out[:, :, 0::2, 0::2] = a - b - d + e
        out[:, :, 1::2, 0::2] = a - b + d - e
        out[:, :, 0::2, 1::2] = a + b - d - e
        out[:, :, 1::2, 1::2] = a + b + d + e
        return self.out(out) + x


class _QuaternionConv(nn.Module):
    """A convolution whose kernel is assembled from four real ones by the Hamilton product."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.r, self.i, self.j, self.k = (
            nn.Parameter(torch.randn(outputs // 4, inputs // 4, 3, 3) / math.sqrt(inputs * 9))
            for _ in range(4)
        )
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        r, i, j, k = self.r, self.i, self.j, self.k
        rows = ([r, -i, -j, -k], [i, r, -k, j], [j, k, r, -i], [k, -j, i, r])
        kernel = torch.cat([torch.cat(row, dim=1) for row in rows], dim=0)
        return F.conv2d(x, kernel, self.bias, stride=1, padding=1)


@odd(image(4, 16, 16))
def quaternions() -> nn.Module:
    """Quaternion convolutions."""
    return nn.Sequential(_QuaternionConv(4, 16), nn.ReLU(), _QuaternionConv(16, 16), nn.ReLU(), nn.AdaptiveMaxPool2d(1),
                         nn.Flatten(), nn.Linear(16, 4))  # fmt: skip


@odd((image(3, 32, 32), image(3, 32, 32), image(3, 32, 32)))
class Triplet(nn.Module):
    """Three images (`forward(*images)`) through one shared tower; two distances and a similarity."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"body": body(), "fc": nn.Linear(16, 8)})
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def embed(self, x: Tensor) -> Tensor:
        x = self.tower["body"](x).mean(dim=[-1, -2])
        return nn.functional.normalize(self.tower["fc"](x), dim=-1)

    def forward(self, *images: Tensor) -> tuple[Tensor, ...]:
        a, p, n = map(self.embed, images)
        similarity = self.scale.exp().clamp(max=100) * (a * p).sum(-1)
        return F.pairwise_distance(a, p), torch.cdist(a.unsqueeze(1), n.unsqueeze(1)).flatten(), similarity
