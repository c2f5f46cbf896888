"""Vision models of 2024 to 2026: small backbones, super-resolution, raw images, optical flow, diffusion, points."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, tokens, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


@odd(image(3, 32, 32))
class LsNet(nn.Module):
    """LSNet: a large kernel computes the weights of a small kernel per position, applied to unfolded patches."""

    def __init__(self, width: int = 16, groups: int = 8) -> None:
        super().__init__()
        self.groups, self.body = groups, body(width)
        self.look = nn.Sequential(
            nn.Conv2d(width, width // 2, 1), nn.BatchNorm2d(width // 2), nn.ReLU(),
            nn.Conv2d(width // 2, width // 2, 7, padding=3, groups=width // 2), nn.BatchNorm2d(width // 2),
            nn.Conv2d(width // 2, 9 * groups, 1), nn.GroupNorm(groups, 9 * groups),
        )  # fmt: skip
        self.bn, self.head = nn.BatchNorm2d(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        b, c, h, w = x.size()
        weights = self.look(x).view(b, 1, self.groups, 9, h, w)
        patches = F.unfold(x, 3, padding=1).view(b, c // self.groups, self.groups, 9, h, w)
        y = (patches * weights).sum(3).view(b, c, h, w)
        return self.head((self.bn(y) + x).mean((-2, -1)))


@odd(image(3, 32, 32))
class OverviewNet(nn.Module):
    """OverLoCK: a coarse overview determines the kernels of the fine branch, one per position and group, by softmax."""

    def __init__(self, width: int = 16, groups: int = 4) -> None:
        super().__init__()
        self.groups, self.body, self.coarse = groups, body(width), nn.Conv2d(width, width, 3, 2, 1)
        self.q, self.k = nn.Conv2d(2 * width, width, 1), nn.Conv2d(2 * width, width, 1)
        self.kernel, self.out, self.head = nn.Linear(25, 25), nn.Conv2d(width, width, 1), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        b, c, h, w = x.shape
        context = F.interpolate(F.gelu(self.coarse(x)), size=(h, w), mode="bilinear", align_corners=False)
        both = torch.cat([x, context], dim=1)
        q = self.q(both).reshape(b, self.groups, c // self.groups, h * w) * (c // self.groups) ** -0.5
        k = F.adaptive_avg_pool2d(self.k(both), (5, 5)).reshape(b, self.groups, c // self.groups, 25)
        attn = self.kernel(torch.einsum("bgcn,bgcl->bgnl", q, k)).softmax(-1)
        values = F.unfold(x, kernel_size=5, padding=2).reshape(b, self.groups, c // self.groups, 25, h * w)
        y = torch.einsum("bgnl,bgcln->bgcn", attn, values).reshape(b, c, h, w)
        return self.head((x + self.out(y)).flatten(2).mean(-1))


@odd(image(3, 32, 32))
class RepMixer(nn.Module):
    """RepNeXt and FastViT: a depthwise convolution minus a BatchNorm; row and column kernels on channel chunks."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.body, self.split = body(width), (width // 3,) * 3
        self.square = nn.Conv2d(width // 3, width // 3, 3, padding=1, groups=width // 3)
        self.row = nn.Conv2d(width // 3, width // 3, (1, 11), padding=(0, 5), groups=width // 3)
        self.column = nn.Conv2d(width // 3, width // 3, (11, 1), padding=(5, 0), groups=width // 3)
        self.norm, self.mixer_norm, self.mixer = (
            nn.BatchNorm2d(width),
            nn.BatchNorm2d(width),
            nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
        )
        self.scale, self.head = nn.Parameter(1e-5 * torch.ones(width, 1, 1)), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        x = x + self.scale * (self.mixer(x) - self.mixer_norm(x))
        a, b, c = x.split(self.split, dim=1)
        x = x + F.gelu(self.norm(torch.cat((self.square(a), self.row(b), self.column(c)), 1)))
        return self.head(x.mean([2, 3]))


@odd(image(3, 16, 16))
class Span(nn.Module):
    """SPAN: parameter-free attention (a centred sigmoid) over features, and a pixel shuffle."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        three = [nn.Conv2d(width, width, 3, padding=1) for _ in range(6)]
        self.blocks = nn.ModuleList(
            nn.Sequential(a, nn.SiLU(True), b, nn.SiLU(True), c) for a, b, c in (three[:3], three[3:])
        )
        self.cat, self.up = nn.Conv2d(3 * width, width, 1), nn.Conv2d(width, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.first(x)]
        for block in self.blocks:
            out = block(features[-1])
            features.append((out + features[-1]) * (torch.sigmoid(out) - 0.5))
        return F.pixel_shuffle(self.up(self.cat(torch.cat(features, 1))), 2)


@odd(image(3, 16, 16))
class Safmn(nn.Module):
    """SAFMN: chunks of channels are pooled to several sizes, upsampled and multiplied by the input; a channel norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.weight, self.bias = (
            nn.Conv2d(3, width, 3, 1, 1), nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)),
        )  # fmt: skip
        self.mfr = nn.ModuleList(
            nn.Conv2d(width // 4, width // 4, 3, 1, 1, groups=width // 4) for _ in range(4)
        )
        self.aggr, self.up = nn.Conv2d(width, width, 1), nn.Conv2d(width, 12, 3, 1, 1)
        self.ccm = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 1, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1)
        )

    def norm(self, x: Tensor) -> Tensor:
        """Returns [N, C, H, W] after layer normalization over the channels."""
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - u) / torch.sqrt(s + 1e-6)) + self.bias[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y, out = self.norm(x), []
        h, w = y.size()[-2:]
        for i, part in enumerate(y.chunk(4, dim=1)):
            if i > 0:
                s = self.mfr[i](F.adaptive_max_pool2d(part, (h // 2**i, w // 2**i)))
                s = F.interpolate(s, size=(h, w), mode="nearest")
            else:
                s = self.mfr[i](part)
            out.append(s)
        x = F.gelu(self.aggr(torch.cat(out, dim=1))) * y + x
        return F.pixel_shuffle(self.up(self.ccm(self.norm(x)) + x), 2)


@odd(image(3, 16, 16))
class Plksr(nn.Module):
    """PLKSR: a large kernel on part of the channels, written back in place; repeated pixels added at the end."""

    def __init__(self, width: int = 16, part: int = 4) -> None:
        super().__init__()
        self.part, self.first = part, nn.Conv2d(3, width, 3, 1, 1)
        self.mix = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 1, 1), nn.Mish(), nn.Conv2d(2 * width, width, 1)
        )
        self.large, self.attn = (
            nn.Conv2d(part, part, 13, 1, 6),
            nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.Sigmoid()),
        )
        self.refine, self.last = nn.Conv2d(width, width, 1), nn.Conv2d(width, 12, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        skip, y = y, self.mix(y)
        if self.training:
            a, b = torch.split(y, [self.part, y.shape[1] - self.part], dim=1)
            y = torch.cat([self.large(a), b], dim=1)
        else:
            y[:, : self.part, :, :] = self.large(y[:, : self.part, :, :])
        y = self.refine(y * self.attn(y)) + skip
        return F.pixel_shuffle(self.last(y) + torch.repeat_interleave(x, repeats=4, dim=1), 2)


@odd((image(1, 32, 32), vector(2)))
class RawIsp(nn.Module):
    """Bayer mosaic to sRGB: packing by slices, gains from metadata, a colour matrix, local curves, a gamma."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(4, 16, 3, 1, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(16, 16, 3, 1, 1)
        )
        self.rgb, self.curves = nn.Conv2d(16, 12, 3, 1, 1), nn.Conv2d(16, 12, 3, 1, 1)
        self.matrix, self.gains = nn.Parameter(torch.eye(3) + 0.1 * torch.randn(3, 3)), nn.Linear(2, 4)

    def forward(self, raw: Tensor, exposure: Tensor) -> Tensor:
        packed = torch.cat(
            (raw[:, :, 0::2, 0::2], raw[:, :, 0::2, 1::2], raw[:, :, 1::2, 0::2], raw[:, :, 1::2, 1::2]), 1
        )
        packed = packed * F.softplus(self.gains(exposure))[:, :, None, None]
        features = self.encode(packed)
        linear = torch.sigmoid(F.pixel_shuffle(self.rgb(features), 2))
        linear = torch.einsum("ij,bjhw->bihw", self.matrix, linear)
        curves = F.interpolate(
            torch.tanh(self.curves(features)), scale_factor=2, mode="bilinear", align_corners=False
        )
        for curve in curves.chunk(4, dim=1):
            linear = linear + curve * (linear * linear - linear)
        return linear.clamp(1e-4, 1.0) ** (1 / 2.2)


@odd((image(3, 32, 32), image(3, 32, 32)))
class LocalCorrelation(nn.Module):
    """Lightweight optical flow: correlation with shifted slices of features, a soft argmax, convex upsampling."""

    def __init__(self, width: int = 16, radius: int = 2) -> None:
        super().__init__()
        self.radius, self.body = radius, body(width)
        self.flow, self.mask = (
            nn.Conv2d((2 * radius + 1) ** 2, 2, 3, padding=1),
            nn.Conv2d(width, 9 * 4, 3, padding=1),
        )

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        f1, f2 = self.body(torch.cat([one, two], dim=0)).chunk(2, dim=0)
        b, c, h, w = f1.shape
        r, padded = self.radius, F.pad(f2, [self.radius] * 4)
        shifts = [(i, j) for i in range(2 * r + 1) for j in range(2 * r + 1)]
        corr = torch.stack(
            [(f1 * padded[:, :, i : i + h, j : j + w]).sum(1) for i, j in shifts], 1
        ) / math.sqrt(c)
        offsets = torch.tensor(shifts, dtype=f1.dtype, device=f1.device) - r
        flow = torch.einsum("bkhw,kd->bdhw", corr.softmax(dim=1), offsets) + self.flow(
            F.leaky_relu(corr, 0.1)
        )
        mask = torch.softmax(self.mask(f1).view(b, 1, 9, 2, 2, h, w), dim=2)
        up = F.unfold(2 * flow, (3, 3), padding=1).view(b, 2, 9, 1, 1, h, w)
        return (mask * up).sum(dim=2).permute(0, 1, 4, 2, 5, 3).reshape(b, 2, 2 * h, 2 * w)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Returns tokens, scaled and shifted per sample."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


@odd((image(4, 8, 8), tokens(1000), tokens(10)))
class DiffusionTransformer(nn.Module):
    """DiT: patches, a sinusoidal time embedding, and six modulation vectors per block from SiLU and a Linear."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch, self.label = nn.Conv2d(4, width, 2, 2), nn.Embedding(11, width)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(approximate="tanh"), nn.Linear(64, width))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.last = nn.Linear(width, 2 * 2 * 4)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        freqs = torch.exp(-math.log(10000) * torch.arange(start=0, end=8, dtype=torch.float32) / 8).to(
            t.device
        )
        args = t[:, None].float() * freqs[None]
        c = self.time(torch.cat([torch.cos(args), torch.sin(args)], dim=-1)) + self.label(y)
        x = self.patch(x).flatten(2).transpose(1, 2)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).chunk(6, dim=1)
        b, n, width = x.shape
        q, k, v = (
            self.qkv(modulate(self.norm1(x), shift1, scale1))
            .reshape(b, n, 3, 4, -1)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, width)
        x = x + gate1.unsqueeze(1) * self.proj(attended)
        x = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        x = self.last(x).reshape(b, 4, 4, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(b, 4, 8, 8)


@odd((vector(2), vector(8)))
class FlowMatching(nn.Module):
    """A flow-matching policy: four midpoint steps of a velocity field, conditioned on an observation by FiLM."""

    def __init__(self, width: int = 32, steps: int = 4) -> None:
        super().__init__()
        self.steps, self.time, self.film = steps, nn.Linear(8, width), nn.Linear(8 + width, 2 * width)
        self.one, self.two, self.out = nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, 2)

    def velocity(self, x: Tensor, t: Tensor, seen: Tensor) -> Tensor:
        """Returns the field at `x` and time `t`, given the observation `seen`."""
        angles = t[:, None] * torch.pi * 2.0 ** torch.arange(4)
        condition = torch.cat([seen, F.silu(self.time(torch.cat([angles.sin(), angles.cos()], -1)))], -1)
        gamma, beta = self.film(condition).chunk(2, -1)
        return self.out(F.silu(self.two(F.silu(self.one(x)) * (1 + gamma) + beta)))

    def forward(self, noise: Tensor, seen: Tensor) -> Tensor:
        x, dt = noise, 1.0 / self.steps
        for i in range(self.steps):
            t = torch.full((x.shape[0],), i * dt, device=x.device)
            half = x + 0.5 * dt * self.velocity(x, t, seen)
            x = x + dt * self.velocity(half, t + 0.5 * dt, seen)
        return x


@odd(image(3, 32, 32))
class Matryoshka(nn.Module):
    """Matryoshka heads: logits from nested prefixes of one embedding, with one shared weight; normalized prefixes."""

    def __init__(self, sizes: tuple[int, ...] = (4, 8, 16)) -> None:
        super().__init__()
        self.sizes, self.body, self.embed, self.head = sizes, body(16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        e = self.embed(self.body(x).mean((2, 3)))
        logits = [e[:, :size] @ self.head.weight[:, :size].t() + self.head.bias for size in self.sizes]
        return {"logits": logits, "embeddings": [F.normalize(e[..., :size], dim=-1) for size in self.sizes]}


@odd((vector(24, 3), vector(24, 4)), opset=18)
class SerializedPoints(nn.Module):
    """Point Transformer v3: points sorted along a curve through grid cells, attention within groups, order restored."""

    def __init__(self, width: int = 16, group: int = 6) -> None:
        super().__init__()
        self.group, self.embed, self.qkv = group, nn.Linear(4, width), nn.Linear(width, 3 * width)
        self.position, self.norm, self.proj = (
            nn.Linear(3, width),
            nn.LayerNorm(width),
            nn.Linear(width, width),
        )
        self.head = nn.Linear(width, 5)

    def forward(self, points: Tensor, features: Tensor) -> Tensor:
        cell = ((points - points.amin(1, keepdim=True)) / 0.5).floor().long().clamp(max=15)
        code = torch.zeros_like(cell[..., 0])
        for bit in range(4):
            for axis in range(3):
                code = code | (((cell[..., axis] >> bit) & 1) << (3 * bit + axis))
        order = torch.argsort(code * 32 + torch.arange(code.shape[1]), dim=1)
        inverse = torch.zeros_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
        x = self.embed(features) + self.position(points)
        b, n, c = x.shape
        y = self.norm(x).gather(1, order[..., None].expand(-1, -1, c)).view(b, n // self.group, self.group, c)
        q, k, v = self.qkv(y).reshape(b, -1, self.group, 3, 2, c // 2).permute(3, 0, 1, 4, 2, 5)
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(b, n, c)
        return self.head(x + self.proj(y).gather(1, inverse.unsqueeze(-1).expand_as(y)))


@odd((vector(20, 8), vector(3)))
class SplatDecoder(nn.Module):
    """Gaussian splats from anchors: opacities, colours, and covariances from scales and quaternions."""

    def __init__(self, width: int = 32, splats: int = 2) -> None:
        super().__init__()
        self.splats, self.trunk = splats, nn.Sequential(nn.Linear(8 + 4, width), nn.ReLU(True))
        self.opacity = nn.Sequential(nn.Linear(width, splats), nn.Tanh())
        self.colour, self.shape = (
            nn.Sequential(nn.Linear(width, 3 * splats), nn.Sigmoid()),
            nn.Linear(width, 7 * splats),
        )

    def forward(self, anchors: Tensor, camera: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        view = anchors[..., :3] - camera[:, None]
        distance = view.norm(dim=2, keepdim=True)
        x = self.trunk(torch.cat([anchors, view / distance, distance], dim=-1))
        opacity, colour = self.opacity(x).flatten(1), self.colour(x).reshape(x.shape[0], -1, 3)
        scale, rotation = self.shape(x).reshape(x.shape[0], -1, 7).split([3, 4], dim=-1)
        w, i, j, k = F.normalize(rotation).unbind(-1)
        rows = [1 - 2 * (j * j + k * k), 2 * (i * j - w * k), 2 * (i * k + w * j),
                2 * (i * j + w * k), 1 - 2 * (i * i + k * k), 2 * (j * k - w * i),
                2 * (i * k - w * j), 2 * (j * k + w * i), 1 - 2 * (i * i + j * j)]  # fmt: skip
        m = torch.stack(rows, -1).unflatten(-1, (3, 3)) @ torch.diag_embed(torch.exp(scale.clamp(-4, 2)))
        return opacity * (opacity > 0), colour, m @ m.transpose(-1, -2)
