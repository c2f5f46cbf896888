"""Blocks of convolutional networks: gates, channel attention, mixtures of experts, drop path, dynamic kernels."""

from __future__ import annotations

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image
from zoo.odd_weights import Plain

odd = List("odd")
ENTRIES = odd.entries


class _SqueezeExcite(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(channels, 4), nn.ReLU(inplace=True), nn.Linear(4, channels), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = F.adaptive_avg_pool2d(x, 1).view(b, c)
        return x * self.fc(y).view(b, c, 1, 1).expand_as(x)


@odd(image(3, 32, 32))
def squeeze_excite() -> nn.Module:
    """Squeeze-and-excitation with Linears, `b, c, _, _ = x.size()` and `expand_as`."""
    return Plain(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), _SqueezeExcite()))


class _Eca(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.mean((2, 3), keepdim=True).squeeze(-1).transpose(-1, -2))
        return x * y.transpose(-1, -2).unsqueeze(-1).sigmoid()


@odd(image(3, 32, 32))
def eca() -> nn.Module:
    """Channel attention with a 1-D convolution over channels (ECA)."""
    return Plain(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), _Eca()))


class _Cbam(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.ReLU(), nn.Conv2d(4, channels, 1))
        self.space = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.mlp(F.adaptive_avg_pool2d(x, 1)) + self.mlp(F.adaptive_max_pool2d(x, 1))
        x = x * torch.sigmoid(gate)
        both = torch.cat([x.mean(1, keepdim=True), torch.max(x, dim=1, keepdim=True)[0]], dim=1)
        return x * torch.sigmoid(self.space(both))


@odd(image(3, 32, 32))
def cbam() -> nn.Module:
    """CBAM: an MLP called twice, and the values of `torch.max(dim=1)`."""
    return Plain(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), _Cbam()))


class _CoordinateAttention(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(channels, 8, 1), nn.BatchNorm2d(8)
        self.high, self.wide = nn.Conv2d(8, channels, 1), nn.Conv2d(8, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, _, h, w = x.size()
        rows = F.adaptive_avg_pool2d(x, (h, 1))
        columns = F.adaptive_avg_pool2d(x, (1, w)).permute(0, 1, 3, 2)
        y = F.hardswish(self.norm(self.one(torch.cat([rows, columns], dim=2))))
        rows, columns = torch.split(y, [h, w], dim=2)
        return x * self.high(rows).sigmoid() * self.wide(columns.permute(0, 1, 3, 2)).sigmoid()


@odd(image(3, 32, 32))
def coordinate_attention() -> nn.Module:
    """Coordinate attention: pools along each axis, concatenated, then split by sizes."""
    return Plain(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), _CoordinateAttention()))


class _NonLocal(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.g, self.theta, self.phi = (nn.Conv2d(channels, 8, 1) for _ in range(3))
        self.out = nn.Conv2d(8, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        g = self.g(x).view(batch, 8, -1).permute(0, 2, 1)
        theta = self.theta(x).view(batch, 8, -1).permute(0, 2, 1)
        phi = F.max_pool2d(self.phi(x), 2).view(batch, 8, -1)
        score = torch.matmul(theta, phi).softmax(dim=-1)
        pooled = g.view(batch, 4, 2, 4, 2, 8).amax((2, 4)).view(batch, 16, 8)
        y = torch.matmul(score, pooled).permute(0, 2, 1).contiguous().view(batch, 8, *x.size()[2:])
        return self.out(y) + x


@odd(image(3, 32, 32))
def non_local() -> nn.Module:
    """A non-local block: attention from all pixels to pooled ones."""
    return Plain(_NonLocal())


class _DropPath(nn.Module):
    """Drop path as in timm: functional, with a shape computed from the input."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1 - self.rate
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        return x * x.new_empty(shape).bernoulli_(keep).div_(keep)


class _StochasticBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), _DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(F.relu(self.norm(self.conv(x))))
        x = F.dropout(x, p=0.3, training=self.training)
        x = F.dropout2d(x, 0.2, self.training)
        return x + 0.1 * torch.randn_like(x) if self.training else x


@odd(image(3, 32, 32))
def noise_in_training() -> nn.Module:
    """Drop path, functional dropout and noise, all only in training."""
    return Plain(nn.Sequential(_StochasticBlock(), _StochasticBlock()))


class _Selective(nn.Module):
    """Selective kernels: two branches, weighted by a softmax over a stacked axis."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=d, dilation=d) for d in (1, 2))
        self.squeeze = nn.Conv2d(16, 8, 1)
        self.excite = nn.ModuleList(nn.Conv2d(8, 16, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.stack([branch(x) for branch in self.branches], dim=1)
        squeezed = F.relu(self.squeeze(parts.sum(1).mean((2, 3), keepdim=True)))
        share = torch.stack([one(squeezed) for one in self.excite], dim=1).softmax(dim=1)
        return (parts * share).sum(dim=1)


@odd(image(3, 32, 32))
def selective_kernel() -> nn.Module:
    """The block of SKNet: a stack, a softmax over the branches and a weighted sum."""
    return Plain(_Selective())


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.gate = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.mean((2, 3))
        share = F.softmax(self.gate(flat), dim=-1)
        mixed = sum(share[:, i : i + 1] * expert(flat) for i, expert in enumerate(self.experts))
        return x * mixed[:, :, None, None]


@odd(image(3, 32, 32))
def soft_experts() -> nn.Module:
    """A mixture of experts with soft gating."""
    return Plain(_Gated())


class _Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[:, : x.size(1) // 2], x[:, x.size(1) // 2 :]
        x = torch.cat((left, self.two(F.relu(self.one(right)))), 1)
        b, c, h, w = x.data.size()
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


@odd(image(3, 32, 32))
def channel_shuffle() -> nn.Module:
    """The unit of ShuffleNetV2, which reads sizes from `x.data.size()`."""
    return Plain(_Shuffle())


class _Ghost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.primary, self.cheap = nn.Conv2d(16, 10, 1), nn.Conv2d(10, 10, 3, padding=1, groups=10)

    def forward(self, x: Tensor) -> Tensor:
        first = self.primary(x)
        return torch.cat([first, self.cheap(first)], dim=1)[:, :16, :, :]


@odd(image(3, 32, 32))
def ghost() -> nn.Module:
    """A ghost module: more channels than needed, cut by a slice."""
    return Plain(_Ghost())


class _Res2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        spx = torch.split(x, 4, 1)
        out, last = [spx[0]], spx[0]
        for i, conv in enumerate(self.convs):
            last = F.relu(conv(spx[i + 1] + last if i else spx[i + 1]))
            out.append(last)
        return torch.cat(out, 1)


@odd(image(3, 32, 32))
def res2() -> nn.Module:
    """Res2Net: a cascade of convolutions over the parts of a split."""
    return Plain(_Res2())


class _Deformable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Conv2d(16, 18, 3, padding=1)
        self.conv = torchvision.ops.DeformConv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, 0.1 * self.offset(x))


@odd(image(3, 32, 32), opset=19)
def deformable() -> nn.Module:
    """`torchvision.ops.DeformConv2d` (ONNX has had DeformConv since opset 19)."""
    return Plain(_Deformable())


class _Kernels(nn.Module):
    """One predicted kernel per pixel (CARAFE, burst denoising): unfold and a weighted sum."""

    def __init__(self) -> None:
        super().__init__()
        self.predict = nn.Conv2d(16, 9, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        kernel = self.predict(x).softmax(1)
        patches = F.unfold(x, 3, padding=1).view(b, c, 9, h, w)
        return (patches * kernel.unsqueeze(1)).sum(2)


@odd(image(3, 32, 32))
def kernel_prediction() -> nn.Module:
    """Kernel prediction: `F.unfold` and a softmax over the window."""
    return Plain(_Kernels())


class _Involution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.span, self.unfold = (
            nn.Conv2d(16, 4, 1),
            nn.Conv2d(4, 9 * 4, 1),
            nn.Unfold(3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = self.span(self.reduce(x))
        b, _, h, w = weight.shape
        weight = weight.view(b, 4, 9, h, w).unsqueeze(2)
        return (weight * self.unfold(x).view(b, 4, 4, 9, h, w)).sum(dim=3).view(b, 16, h, w)


@odd(image(3, 32, 32))
def involution() -> nn.Module:
    """Involution: one kernel per group and pixel."""
    return Plain(_Involution())


class _Capsules(nn.Module):
    """Capsules with three rounds of routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 64, 4, 4, 16) * 0.2)

    @staticmethod
    def squash(s: Tensor) -> Tensor:
        """Returns the vectors with their length reduced to below 1."""
        norm = s.pow(2).sum(-1, keepdim=True)
        return norm / (1 + norm) * s / torch.sqrt(norm + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        u = x.permute(0, 2, 3, 1).reshape(b, 64, 1, 16, 1)
        votes = (self.weight @ u).squeeze(-1)
        logits = torch.zeros(b, 64, 4, 1, device=x.device)
        for i in range(3):
            v = self.squash((logits.softmax(2) * votes).sum(1, keepdim=True))
            if i < 2:
                logits = logits + (votes * v).sum(-1, keepdim=True)
        return v.reshape(b, 16, 1, 1)


@odd(image(3, 32, 32))
def capsules() -> nn.Module:
    """Capsule routing: a batched matmul with a parameter, in a loop."""
    return Plain(_Capsules())
