"""Models for inputs of several sizes: convolutions, attention, recurrent layers, computations with sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torchvision.models.detection.fcos import FCOSHead


def block(inside: int, outside: int) -> nn.Sequential:
    """Returns a 3x3 convolution with BatchNorm and ReLU."""
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())


class UNet(nn.Module):
    """A U-Net that pads upsampled features to the size of the skip connection if `pads` is true."""

    def __init__(self, pads: bool) -> None:
        super().__init__()
        self.pads = pads
        self.one, self.two, self.three = block(3, 8), block(8, 16), block(16, 16)
        self.up, self.join = nn.ConvTranspose2d(16, 16, 2, 2), block(32, 8)
        self.up_again, self.end = nn.ConvTranspose2d(8, 8, 2, 2), block(16, 4)

    def forward(self, x: Tensor) -> Any:
        one = self.one(x)
        two = self.two(F.max_pool2d(one, 2))
        three = self.three(F.max_pool2d(two, 2))
        joined = self.join(self.cat(self.up(three), two))
        return self.end(self.cat(self.up_again(joined), one))

    def cat(self, y: Tensor, x: Tensor) -> Tensor:
        if self.pads:
            rows, columns = x.size()[2] - y.size()[2], x.size()[3] - y.size()[3]
            y = F.pad(y, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return torch.cat([x, y], 1)


class Branches(nn.Module):
    """Computations that depend on how sizes round.

    Sums of pooled and strided branches, whose sizes agree only if the input's is a multiple of eight; a pool
    that rounds up; and a size read from a tensor that a ReLU changed in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.ceil = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.strided, self.pooled = (
            nn.Conv2d(8, 8, 3, 2, 1),
            nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 1)),
        )
        self.last, self.end = nn.Conv2d(8, 8, 4, 4), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        y = F.relu(self.strided(x) + self.pooled(x), inplace=True)
        y = y + F.interpolate(self.ceil(x), y.shape[-2:])
        h, w = x.size(2), x.size(3)
        z = F.avg_pool2d(self.strided(F.avg_pool2d(y, 2)), 1) + F.avg_pool2d(self.last(x), 2, ceil_mode=True)
        return self.end(F.interpolate(z, (h // 2, w // 2)) + y)


class Grids(nn.Module):
    """A spatial transformer, and coordinates concatenated to the features, as in CoordConv."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.turn = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(10, 8, 3, 1, 1), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.one(x))
        h, w = y.shape[-2:]
        rows = torch.linspace(-1, 1, h).view(1, 1, h, 1).expand(len(x), 1, h, w)
        columns = torch.linspace(start=0.5, end=2.0, steps=w).view(1, 1, 1, w).expand(len(x), 1, h, w)
        y = self.two(torch.cat([y, rows, columns], 1))
        theta = 0.1 * self.turn(y.mean((2, 3))).view(-1, 2, 3) + torch.eye(2, 3)
        moved = F.grid_sample(
            y, F.affine_grid(theta, list(y.shape), align_corners=False), align_corners=False
        )
        return moved + F.affine_grid(theta, [len(x), 1, h, w], align_corners=True).sum(-1).unsqueeze(1)


class Heads(nn.Module):
    """FCOS's head over two levels; for images of 64x64, the second level has a single position."""

    def __init__(self) -> None:
        super().__init__()
        strides = ((3, 32), (32, 2))
        self.levels = nn.ModuleList(nn.Conv2d(inside, 32, 3, stride, 1) for inside, stride in strides)
        self.head = FCOSHead(32, 1, 3, 1)

    def forward(self, x: Tensor) -> Any:
        found = []
        for level in self.levels:
            x = F.relu(level(x))
            found.append(x)
        return tuple(self.head(found).values())


class Pyramid(nn.Module):
    """Boxes of two levels; the coarser one has a stride of 128, hence one row for up to 128 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, 8, 1), nn.Conv2d(8, 8, 3, 16, 1)
        self.head = nn.Conv2d(8, 12, 3, 1, 1)

    def forward(self, x: Tensor) -> Any:
        one = F.relu(self.one(x))
        found = []
        for level in (one, F.relu(self.two(one))):
            y = self.head(level)
            n, _, h, w = y.shape
            found.append(y.view(n, -1, 4, h, w).permute(0, 3, 4, 1, 2).reshape(n, -1, 4))
        return torch.cat(found, 1)


class Pools(nn.Module):
    """Global pools whose windows are computed from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.gate = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 8)
        self.words, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Any:
        y = F.hardtanh(self.one(x), 0.0, 0.5)  # keeps the values of larger images from growing
        y = y * self.gate(F.avg_pool2d(y, y.size()[2:]).flatten(1)).sigmoid()[:, :, None, None]
        words = self.words(y.flatten(2)).sigmoid()
        parts = [
            F.avg_pool2d(y, kernel_size=(y.shape[2], y.shape[3])).flatten(1),
            F.max_pool2d(y, list(y.shape[-2:]), 1).flatten(1),
            F.max_pool1d(words, words.size(2)).squeeze(2),
        ]
        return self.head(torch.cat(parts, 1))


class Detector(nn.Module):
    """A pyramid whose coarse level is resized to the fine one, and boxes in pixels computed from a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.lateral, self.head = (
            nn.BatchNorm2d(16),
            nn.Conv2d(8, 16, 1),
            nn.Conv2d(16, 6, 3, 1, 1),
        )

    def forward(self, x: Tensor) -> Any:
        one = F.relu(self.one(x))
        two = F.relu(self.norm(self.two(one)))
        both = self.lateral(one) + F.interpolate(two, size=one.shape[-2:], mode="nearest")
        y = self.head(both)
        n, _, h, w = y.shape
        grid = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
        return ((y.view(n, 3, 2, h, w).permute(0, 1, 3, 4, 2) + grid.float()) * 2).reshape(n, -1, 2)


class ToMultiple(nn.Module):
    """Pads images to a multiple of 16 and crops the output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(pads=False)

    def forward(self, x: Tensor) -> Any:
        h, w = x.shape[-2:]
        rows, columns = math.ceil(h / 16) * 16 - h, -(-w // 16) * 16 - w
        return self.net(F.pad(x, (0, columns, 0, rows)))[..., :h, :w]


class Vocoder(nn.Module):
    """Converts mel frames to samples, 12 per frame."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Conv1d(20, 16, 7, padding=3))
        self.up = weight_norm(nn.ConvTranspose1d(16, 8, 8, 4, 2))
        self.odd = nn.ConvTranspose1d(8, 8, 5, 3, 1, output_padding=1)
        self.last = weight_norm(nn.Conv1d(8, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Any:
        y = self.up(F.leaky_relu(self.first(x), 0.1))
        return torch.tanh(self.last(F.leaky_relu(self.odd(F.leaky_relu(y, 0.1)))))


class RelativeAttention(nn.Module):
    """Attention with the relative positions of Transformer-XL and their shift trick."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv, self.of_positions, self.out = (nn.Linear(width, n * width) for n in (3, 1, 1))
        self.norm, self.bias = nn.LayerNorm(width), nn.Parameter(torch.randn(heads, 1, width // heads) * 0.1)

    def forward(self, x: Tensor) -> Any:
        n, steps, width = x.shape
        q, k, v = (
            t.view(n, steps, self.heads, self.size).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        places = torch.arange(steps - 1, -steps, -1.0)[:, None] * torch.linspace(0.01, 1, width // 2)
        table = self.of_positions(torch.cat([places.sin(), places.cos()], 1))
        table = table.view(1, -1, self.heads, self.size).transpose(1, 2)
        moved = F.pad(q @ table.mT, (1, 0)).view(n, self.heads, -1, steps)[:, :, 1:]
        moved = moved.reshape(n, self.heads, steps, 2 * steps - 1)[..., :steps]
        weights = (((q + self.bias) @ k.mT + moved) / math.sqrt(self.size)).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(n, steps, width))


class Conformer(nn.Module):
    """Convolutions, attention and a gate over frames [N, T, 20]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU())
        self.project, self.attention = nn.Linear(8 * 4, width), RelativeAttention(width)
        self.wide, self.deep = (
            nn.Conv1d(width, 2 * width, 1),
            nn.Conv1d(width, width, 9, padding=4, groups=width),
        )
        self.norm, self.narrow, self.out = (
            nn.BatchNorm1d(width),
            nn.Conv1d(width, width, 1),
            nn.Linear(width, 10),
        )

    def forward(self, x: Tensor) -> Any:
        y = self.front(x.unsqueeze(1))
        n, channels, steps, bands = y.size()
        y = self.attention(self.project(y.transpose(1, 2).contiguous().view(n, steps, channels * bands)))
        z = F.glu(self.wide(y.transpose(1, 2)), 1)
        return self.out(y + self.narrow(F.silu(self.norm(self.deep(z)))).transpose(1, 2))


class Streams(nn.Module):
    """A GRU over several streams, each with its own state, with the time or the batch axis first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.inside, self.gru = nn.Linear(20, 32), nn.GRU(32, 24, batch_first=batch_first)
        self.out = nn.Linear(24, 5)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.gru(F.relu(self.inside(x)), state)
        return self.out(y), state


class Cached(nn.Module):
    """Attention with a KV cache: new steps attend to cached and new keys and values; returns the extended cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, steps, width = x.shape
        q, k, v = (t.view(n, steps, 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        y = F.scaled_dot_product_attention(q, keys, values)
        return self.out(y.transpose(1, 2).reshape(n, steps, width)), keys, values


class Causal(nn.Module):
    """Causal attention over up to 40 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(50, 32), nn.Embedding(40, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 7)

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids) + self.places(torch.arange(ids.size(1)))
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Masked(nn.Module):
    """A Transformer layer with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 32), nn.Linear(32, 7)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.out(self.layer(self.table(ids), src_key_padding_mask=mask == 0))


class TimeMajor(nn.Module):
    """A Transformer layer over [T, N, 24]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.layer(x))


class Folded(nn.Module):
    """Folds patches to an image of the input's size and classifies it; a dynamic size needs opset 18."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv, self.mix, self.fc = nn.Conv2d(3, 8, 3, 1, 1), nn.Linear(32, 32), nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Any:
        x = self.conv(x)
        patches = self.mix(F.unfold(x, 2, stride=2).mT).mT
        return self.fc(F.fold(patches, x.shape[2:], 2, stride=2).mean((2, 3)))


class Sequencer(nn.Module):
    """LSTMs over the rows and over the columns of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.end = nn.Conv2d(3, 12, 7, 7), nn.Linear(24, 6)
        self.rows, self.columns = (nn.LSTM(12, 6, batch_first=True, bidirectional=True) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        rows = self.rows(x.permute(0, 2, 1, 3).reshape(-1, h, c))[0].reshape(n, w, h, -1)
        columns = self.columns(x.reshape(-1, w, c))[0].reshape(n, h, w, -1)
        return self.end(torch.cat([rows.permute(0, 2, 1, 3), columns], -1))


class Coordinates(nn.Module):
    """Means along rows and along columns (coordinate attention), one by a module and one by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rows = nn.Conv2d(3, 8, 3, 2, 1), nn.AdaptiveAvgPool2d((None, 1))
        self.mix, self.end = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        h, w = x.shape[2:]
        columns = F.adaptive_avg_pool2d(x, (1, w)).mT
        y = F.relu(self.mix(torch.cat([self.rows(x), columns], 2)))
        high, wide = torch.split(y, [h, w], 2)
        return self.end(x * high.sigmoid() * wide.mT.sigmoid())


class HalfRows(nn.Module):
    """A pool that halves the number of rows, which torch's exporter can only write for a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return F.adaptive_avg_pool2d(self.conv(x), (x.shape[2] // 2, 1))


class Pair(nn.Module):
    """Features of two images, computed as one batch and then split, and their product."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.end = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, one: Tensor, two: Tensor) -> Any:
        first, second = F.relu(self.features(torch.cat([one, two]))).chunk(2)
        return self.end(first * second)


class Windows(nn.Module):
    """Attention within windows of 4x4 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.inside, self.out = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        x = self.patches(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        y = x.view(n, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        y = self.inside(y)
        y = (y @ y.mT).softmax(-1) @ y
        y = y.view(n, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return self.out(x + y)
