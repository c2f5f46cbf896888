"""Audio and streaming models of 2023 to 2026: enhancement, keyword spotting, codecs, caches, video."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector

odd = List("odd")
ENTRIES = odd.entries


@odd(vector(12, 33, 2))
class GroupedEnhancer(nn.Module):
    """GTCRN: bands merged by a fixed matrix, grouped GRUs over frequency and time, a complex mask."""

    def __init__(self, bands: int = 16) -> None:
        super().__init__()
        merge = torch.zeros(bands, 33)
        for i in range(bands):
            merge[i, 2 * i : 2 * i + 3] = 1 / 3
        self.register_buffer("merge", merge)
        self.merge: Tensor
        self.encode = nn.Sequential(nn.Conv2d(3, 8, (1, 5), (1, 2), (0, 2)), nn.BatchNorm2d(8), nn.PReLU())
        self.point, self.depth = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4)
        self.intra = nn.ModuleList(nn.GRU(4, 2, batch_first=True, bidirectional=True) for _ in range(2))
        self.inter, self.fc, self.norm = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 8), nn.LayerNorm((8, 8))
        self.decode = nn.ConvTranspose2d(8, 2, (1, 5), (1, 2), (0, 2), output_padding=(0, 1))

    def forward(self, spec: Tensor) -> Tensor:
        real, imag = spec[..., 0], spec[..., 1]
        size = torch.sqrt(real**2 + imag**2 + 1e-12)
        x = torch.stack([size, real, imag], dim=1) @ self.merge.T
        x = self.encode(x)
        a, b = x.chunk(2, dim=1)
        a = self.depth(F.pad(self.point(a), [1, 1, 2, 0]))
        x = torch.stack([a, b], dim=1).transpose(1, 2).reshape(x.shape)
        n, c, t, f = x.shape
        y = x.permute(0, 2, 3, 1).reshape(n * t, f, c)
        y = torch.cat([rnn(part)[0] for rnn, part in zip(self.intra, y.chunk(2, -1), strict=True)], dim=-1)
        y = y.view(n, t, f, c).permute(0, 2, 1, 3).reshape(n * f, t, c)
        y = self.fc(self.inter(y)[0]).view(n, f, t, c).permute(0, 2, 1, 3)
        x = x + self.norm(y).permute(0, 3, 1, 2)
        mask = torch.tanh(self.decode(x)) @ self.merge
        out_real = real * mask[:, 0] - imag * mask[:, 1]
        return torch.stack([out_real, imag * mask[:, 0] + real * mask[:, 1]], dim=-1)


@odd((vector(1, 10, 24, 2), vector(1, 10, 8)))
class DeepFilter(nn.Module):
    """DeepFilterNet: per-band gains, and a complex filter over 3 frames, by unfold, for the low frequencies."""

    def __init__(self, order: int = 3, low: int = 12) -> None:
        super().__init__()
        self.order, self.low = order, low
        self.gru, self.gains = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 8)
        self.coefficients, self.alpha = nn.Linear(16, low * order * 2), nn.Linear(16, 1)
        self.register_buffer("inverse", torch.eye(8).repeat_interleave(3, dim=1))
        self.inverse: Tensor

    def forward(self, spec: Tensor, features: Tensor) -> Tensor:
        e, _ = self.gru(features.squeeze(1))
        gains = torch.sigmoid(self.gains(e)) @ self.inverse
        masked = spec * gains[:, None, :, :, None]
        b, t = e.shape[:2]
        coefficients = torch.tanh(self.coefficients(e)).view(b, t, self.low, self.order, 2)
        padded = F.pad(spec[:, 0, :, : self.low], (0, 0, 0, 0, self.order - 1, 0))
        frames = padded.unfold(1, self.order, 1).transpose(-1, -2)
        real = (frames[..., 0] * coefficients[..., 0] - frames[..., 1] * coefficients[..., 1]).sum(-1)
        imag = (frames[..., 1] * coefficients[..., 0] + frames[..., 0] * coefficients[..., 1]).sum(-1)
        filtered, alpha = torch.stack((real, imag), -1), torch.sigmoid(self.alpha(e))[..., None]
        out = masked.clone()
        out[:, 0, :, : self.low] = filtered * alpha + masked[:, 0, :, : self.low] * (1 - alpha)
        return out


class _SubSpectral(nn.Module):
    """BatchNorm with separate statistics for every frequency band."""

    def __init__(self, channels: int, bands: int) -> None:
        super().__init__()
        self.bands, self.bn = bands, nn.BatchNorm2d(channels * bands)

    def forward(self, x: Tensor) -> Tensor:
        n, c, f, t = x.size()
        return self.bn(x.view(n, c * self.bands, f // self.bands, t)).view(n, c, f, t)


@odd(image(1, 20, 24))
class BcResNet(nn.Module):
    """BC-ResNet: 2-D features are averaged over frequency, convolved over time, and added back by broadcasting."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 5, (2, 1), 2), nn.BatchNorm2d(width), nn.ReLU())
        self.f2 = nn.Sequential(
            nn.Conv2d(width, width, (3, 1), 1, (1, 0), groups=width), _SubSpectral(width, 5)
        )
        self.f1 = nn.Sequential(
            nn.Conv2d(width, width, (1, 3), padding=(0, 2), dilation=(1, 2), groups=width), nn.BatchNorm2d(width),
            nn.SiLU(), nn.Conv2d(width, width, 1), nn.Dropout2d(0.1),
        )  # fmt: skip
        self.head = nn.Conv2d(width, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.f2(x)
        x = F.relu(x + y + self.f1(torch.mean(y, dim=2, keepdim=True)))
        return self.head(x.mean(-1, keepdim=True).mean(-2, keepdim=True)).squeeze(-1).squeeze(-1)


@odd(vector(16, 40))
class MatchboxNet(nn.Module):
    """MatchboxNet: separable 1-D convolutions over time, a pointwise residual with a norm, pooled statistics."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def unit(c1: int, c2: int, k: int, dilation: int = 1) -> nn.Sequential:
            pad = dilation * (k - 1) // 2
            return nn.Sequential(
                nn.Conv1d(c1, c1, k, 1, pad, dilation, groups=c1, bias=False), nn.Conv1d(c1, c2, 1, bias=False),
                nn.BatchNorm1d(c2, eps=1e-3),
            )  # fmt: skip

        self.prologue, self.units = (
            unit(16, width, 11),
            nn.ModuleList(unit(width, width, 13) for _ in range(2)),
        )
        self.residual = nn.Sequential(nn.Conv1d(width, width, 1, bias=False), nn.BatchNorm1d(width))
        self.epilogue, self.head = unit(width, 32, 7, 2), nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.prologue(x))
        y = self.units[1](F.dropout(F.relu(self.units[0](x)), 0.1, self.training))
        x = F.relu(self.epilogue(F.relu(y + self.residual(x))))
        std, mean = torch.std_mean(x, dim=-1)
        return self.head(torch.cat((mean, std), dim=1))


@odd((vector(4, 16), vector(6, 16), vector(16, 4)))
class StreamingConformer(nn.Module):
    """One chunk of a streaming Conformer: relative positions; attention and convolution caches in and out."""

    def __init__(self, width: int = 16, count: int = 2) -> None:
        super().__init__()
        self.count, self.width = count, width
        self.ff = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, width))
        self.norm, self.q, self.k, self.v, self.pos = (
            nn.LayerNorm(width),
            *(nn.Linear(width, width) for _ in range(4)),
        )
        self.u, self.w = (nn.Parameter(torch.randn(count, width // count)) for _ in range(2))
        self.conv_norm, self.glu = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.depth, self.bn, self.out = (
            nn.Conv1d(width, width, 5, groups=width),
            nn.BatchNorm1d(width),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x: Tensor, left: Tensor, conv_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + 0.5 * self.ff(x)
        y = torch.cat([left, self.norm(x)], dim=1)
        b, t, s = x.size(0), x.size(1), y.size(1)
        q = self.q(y[:, -t:]).view(b, t, self.count, -1)
        k, v = (f(y).view(b, s, self.count, -1).transpose(1, 2) for f in (self.k, self.v))
        place = torch.arange(s - 1, -t, -1.0, device=x.device)
        rate = torch.exp(torch.arange(0, self.width, 2).float() * -(math.log(10000.0) / self.width))
        table = torch.stack([(place[:, None] * rate).sin(), (place[:, None] * rate).cos()], -1).flatten(1)
        p = self.pos(table).view(-1, self.count, self.width // self.count).permute(1, 2, 0)
        ac, bd = (
            torch.matmul((q + self.u).transpose(1, 2), k.mT),
            torch.matmul((q + self.w).transpose(1, 2), p),
        )
        n = bd.size(-1)
        bd = F.pad(bd, (1, 0)).view(b, self.count, n + 1, t)[:, :, 1:].view(b, self.count, t, n)[..., :s]
        x = x + (((ac + bd) / 8**0.5).softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1)
        z = torch.cat([conv_cache, F.glu(self.glu(self.conv_norm(x).transpose(1, 2)), dim=1)], dim=2)
        x = x + self.out(F.silu(self.bn(self.depth(z)))).transpose(1, 2)
        return x, y[:, -left.size(1) :], z[:, :, -conv_cache.size(2) :]


@odd(vector(1, 128))
class ResidualCodec(nn.Module):
    """A streaming codec: causal strided convolutions, Snake, residual vector quantization; audio and codes out."""

    def __init__(self, width: int = 16, codes: int = 16, books: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(i, o, 8, 4) for i, o in ((1, 8), (8, width)))
        self.up = nn.ModuleList(nn.ConvTranspose1d(i, o, 8, 4) for i, o in ((width, 8), (8, 1)))
        self.alpha, self.books = (
            nn.Parameter(torch.ones(1, 8, 1)),
            nn.ParameterList(nn.Parameter(torch.randn(codes, width) * 0.5**i) for i in range(books)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.down[0](F.pad(x, (4, 0)))
        x = x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)
        z = self.down[1](F.pad(x, (4, 0))).transpose(1, 2)
        residual, total, codes = z, torch.zeros_like(z), []
        for book in self.books:
            index = torch.cdist(residual, book[None], p=2).argmin(dim=-1)
            found = F.embedding(index, book)
            residual, total = residual - found.detach(), total + found
            codes.append(index)
        z = z + (total - z).detach() if self.training else total
        y = F.elu(self.up[0](z.transpose(1, 2))[..., :-4])
        return torch.tanh(self.up[1](y)[..., :-4]), torch.stack(codes, dim=1)


@odd(vector(16, 12))
class Vocos(nn.Module):
    """Vocos: a ConvNeXt block over frames, a head for magnitudes and phases, the inverse STFT as a convolution."""

    def __init__(self, width: int = 24, window: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv1d(16, width, 7, padding=3)
        self.dw, self.norm = (
            nn.Conv1d(width, width, 7, padding=3, groups=width),
            nn.LayerNorm(width, eps=1e-6),
        )
        self.pw1, self.pw2, self.gamma = (
            nn.Linear(width, 48),
            nn.Linear(48, width),
            nn.Parameter(0.3 * torch.ones(width)),
        )
        self.out, self.hop = nn.Linear(width, window + 2), window // 4
        angle = 2 * math.pi * torch.outer(torch.arange(window // 2 + 1), torch.arange(window)) / window
        weight = torch.full((window // 2 + 1, 1), 2.0 / window)
        weight[0], weight[-1] = 1 / window, 1 / window
        basis = torch.cat([weight * angle.cos(), -weight * angle.sin()]) * torch.hann_window(window)
        self.register_buffer("basis", basis.unsqueeze(1))
        self.basis: Tensor

    def forward(self, mel: Tensor) -> Tensor:
        x = self.embed(mel)
        y = self.norm(self.dw(x).transpose(1, 2))
        x = x + (self.gamma * self.pw2(F.gelu(self.pw1(y)))).transpose(1, 2)
        size, phase = self.out(x.transpose(1, 2)).transpose(1, 2).chunk(2, dim=1)
        size = torch.clip(torch.exp(size), max=1e2)
        spec = torch.cat([size * torch.cos(phase), size * torch.sin(phase)], dim=1)
        return F.conv_transpose1d(spec, self.basis, stride=self.hop)[:, 0, 6:-6]


@odd(vector(12, 16))
class Zipformer(nn.Module):
    """Zipformer: BiasNorm, Swoosh activations, a block at half the frame rate, and bypasses."""

    class Block(nn.Module):
        """A feed-forward layer and a convolution with a learned bypass."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.bias, self.log_scale = (
                nn.Parameter(torch.randn(width) * 0.1),
                nn.Parameter(torch.tensor(0.2)),
            )
            self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)
            self.conv, self.bypass = (
                nn.Conv1d(width, width, 7, padding=3, groups=width),
                nn.Parameter(torch.full((width,), 0.6)),
            )

        def forward(self, x: Tensor) -> Tensor:
            zero, y = torch.tensor(0.0, dtype=x.dtype, device=x.device), self.up(x)
            y = x + self.down(torch.logaddexp(zero, y - 4.0) - 0.08 * y - 0.035)
            z = self.conv(y.transpose(1, 2)).transpose(1, 2)
            y = y + torch.logaddexp(zero, z - 1.0) - 0.08 * z - 0.313261687
            scale = torch.mean((y - self.bias) ** 2, dim=-1, keepdim=True) ** -0.5 * self.log_scale.exp()
            return x + (y * scale - x) * self.bypass.clamp(min=0.2, max=1.0)

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one, self.two, self.weights = self.Block(width), self.Block(width), nn.Parameter(torch.randn(2))
        self.combine = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        b, t, c = x.shape
        half = (x.reshape(b, t // 2, 2, c) * self.weights.softmax(dim=0)[:, None]).sum(dim=2)
        half = self.two(half).unsqueeze(2).expand(b, t // 2, 2, c).reshape(b, t, c)
        return x * (1 - self.combine) + half * self.combine


@odd((image(3, 4, 16, 16), vector(8, 2, 8, 8)))
class StreamedVideo(nn.Module):
    """Streaming MoViNet: causal (2+1)-D convolutions with a buffer of frames, and a cumulative mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.Sequential(
            nn.Conv3d(3, 8, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False), nn.BatchNorm3d(8), nn.Hardswish()
        )
        self.time, self.head = nn.Conv3d(8, 8, (3, 1, 1), groups=8, bias=False), nn.Linear(8, 5)
        self.fc1, self.fc2 = nn.Conv3d(8, 4, 1), nn.Conv3d(4, 8, 1)

    def forward(self, clip: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        x: Any = self.space(clip)
        x = torch.cat((buffer, x), 2)
        buffer = x[:, :, -2:, :, :].clone()
        x = self.time(x)
        count = torch.arange(1, x.shape[2] + 1, device=x.device).view(1, 1, -1, 1, 1)
        seen = torch.cumsum(F.adaptive_avg_pool3d(x, (x.shape[2], 1, 1)), dim=2) / count
        x = x * F.hardsigmoid(self.fc2(F.relu(self.fc1(seen))))
        return self.head(x.mean((3, 4))[:, :, -1]), buffer
