"""Detectors of 2024 to 2026: blocks of YOLO 10 to 12, heads without NMS, RT-DETR and D-FINE."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


class Conv(nn.Module):
    """The unit of YOLO: convolution, BatchNorm and SiLU."""

    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1, g: int = 1, act: bool = True) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(c1, c2, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(c2)
        self.act = nn.SiLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class _Bottleneck(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.add = Conv(c, c // 2, 3), Conv(c // 2, c, 3), True

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class _C3k2(nn.Module):
    def __init__(self, c: int, n: int = 1) -> None:
        super().__init__()
        self.c, self.cv1, self.cv2 = c // 2, Conv(c, c), Conv((2 + n) * (c // 2), c)
        self.m = nn.ModuleList(_Bottleneck(c // 2) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class _Psa(nn.Module):
    """Attention over all positions, which are encoded by a depthwise convolution of the values."""

    def __init__(self, dim: int, count: int = 2) -> None:
        super().__init__()
        self.num_heads, self.head_dim = count, dim // count
        self.key_dim = self.head_dim // 2
        self.qkv = Conv(dim, dim + self.key_dim * count * 2, act=False)
        self.proj, self.pe = Conv(dim, dim, act=False), Conv(dim, dim, 3, g=dim, act=False)
        self.ffn = nn.Sequential(Conv(dim, dim * 2), Conv(dim * 2, dim, act=False))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        qkv = self.qkv(x).view(b, self.num_heads, self.key_dim * 2 + self.head_dim, h * w)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.head_dim], dim=2)
        attn = ((q.transpose(-2, -1) @ k) * self.key_dim**-0.5).softmax(dim=-1)
        y = (v @ attn.transpose(-2, -1)).view(b, c, h, w) + self.pe(v.reshape(b, c, h, w))
        x = x + self.proj(y)
        return x + self.ffn(x)


@odd(image(3, 64, 64))
class Yolo11(nn.Module):
    """YOLO11: C3k2, SPPF and C2PSA blocks, and a head with a depthwise class branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv(3, 8, 3, 2), Conv(8, 16, 3, 2), _C3k2(16))
        self.down, self.cv1, self.cv2 = Conv(16, 32, 3, 2), Conv(32, 16), Conv(64, 32)
        self.pool, self.split, self.psa, self.join = (
            nn.MaxPool2d(5, 1, 2),
            Conv(32, 32),
            _Psa(16),
            Conv(32, 32),
        )
        self.neck = Conv(48, 16)
        self.boxes = nn.ModuleList(nn.Sequential(Conv(c, 16, 3), nn.Conv2d(16, 16, 1)) for c in (16, 32))
        self.classes = nn.ModuleList(
            nn.Sequential(Conv(c, c, 3, g=c), Conv(c, 16), nn.Conv2d(16, 5, 1)) for c in (16, 32)
        )

    def forward(self, x: Tensor) -> Tensor:
        p3 = self.stem(x)
        y = [self.cv1(self.down(p3))]
        y.extend(self.pool(y[-1]) for _ in range(3))
        a, b = self.split(self.cv2(torch.cat(y, 1))).split((16, 16), dim=1)
        p4 = self.join(torch.cat((a, self.psa(b)), 1))
        p3 = self.neck(torch.cat([F.interpolate(p4, scale_factor=2, mode="nearest"), p3], 1))
        levels = zip((p3, p4), self.boxes, self.classes, strict=True)
        found = [torch.cat((box(p), cls(p)), 1).view(x.shape[0], 21, -1) for p, box, cls in levels]
        box, cls = torch.cat(found, 2).split((16, 5), 1)
        b, _, n = box.shape
        bins = box.view(b, 4, 4, n).transpose(2, 1).softmax(1)
        distance = (bins * torch.arange(4, dtype=torch.float).view(1, 4, 1, 1)).sum(1)
        return torch.cat((distance, cls.sigmoid()), 1)


@odd(image(3, 64, 64))
class Yolo12(nn.Module):
    """YOLOv12: area attention over strips of the feature map, and an R-ELAN block with a scaled residual."""

    class Area(nn.Module):
        """Attention within each of `area` strips of the flattened feature map."""

        def __init__(self, dim: int, count: int = 2, area: int = 4) -> None:
            super().__init__()
            self.area, self.num_heads, self.qkv = area, count, Conv(dim, dim * 3, act=False)
            self.proj, self.pe = Conv(dim, dim, act=False), Conv(dim, dim, 7, g=dim, act=False)
            self.mlp = nn.Sequential(Conv(dim, 2 * dim), Conv(2 * dim, dim, act=False))

        def forward(self, x: Tensor) -> Tensor:
            b0, c, h, w = x.shape
            qkv, b, n = self.qkv(x).flatten(2).transpose(1, 2), b0, h * w
            if self.area > 1:
                qkv = qkv.reshape(b0 * self.area, n // self.area, c * 3)
                b, n, _ = qkv.shape
            q, k, v = (
                qkv.view(b, n, self.num_heads, -1).permute(0, 2, 3, 1).split([c // self.num_heads] * 3, dim=2)
            )
            attn = ((q.transpose(-2, -1) @ k) * (c // self.num_heads) ** -0.5).softmax(dim=-1)
            y, v = (v @ attn.transpose(-2, -1)).permute(0, 3, 1, 2), v.permute(0, 3, 1, 2)
            if self.area > 1:
                y, v = (one.reshape(b // self.area, n * self.area, c) for one in (y, v))
            y, v = (one.reshape(b0, h, w, c).permute(0, 3, 1, 2).contiguous() for one in (y, v))
            x = x + self.proj(y + self.pe(v))
            return x + self.mlp(x)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv(3, 16, 3, 2), Conv(16, 32, 3, 2, g=2), Conv(32, 32, 3, 2))
        self.cv1, self.cv2, self.gamma = Conv(32, 16), Conv(48, 32), nn.Parameter(0.01 * torch.ones(32))
        self.m = nn.ModuleList(nn.Sequential(*(self.Area(16) for _ in range(2))) for _ in range(2))
        self.head = nn.Conv2d(32, 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = [self.cv1(x)]
        y.extend(m(y[-1]) for m in self.m)
        joined = self.cv2(torch.cat(y, 1))
        return self.head(x + self.gamma.view(-1, self.gamma.shape[0], 1, 1) * joined)


@odd(image(3, 32, 32))
class OneToOneHead(nn.Module):
    """YOLOv10 and YOLO26: a second head, on detached features, for one box per object; topk instead of NMS."""

    def __init__(self, classes: int = 4, best: int = 6) -> None:
        super().__init__()
        self.nc, self.best, self.body = classes, best, body(16)
        self.many, self.one = nn.Conv2d(16, 4 + classes, 1), nn.Conv2d(16, 4 + classes, 1)

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        x = self.body(x)
        one = self.one(x.detach())
        if self.training:
            return {"one2many": self.many(x), "one2one": one}
        boxes, scores = one.flatten(2).permute(0, 2, 1).split([4, self.nc], dim=-1)
        scores = scores.sigmoid()
        index = scores.amax(dim=-1).topk(self.best)[1].unsqueeze(-1)
        boxes = boxes.gather(dim=1, index=index.repeat(1, 1, 4))
        scores, flat = scores.gather(dim=1, index=index.repeat(1, 1, self.nc)).flatten(1).topk(self.best)
        i = torch.arange(boxes.shape[0])[..., None]
        return torch.cat(
            [boxes[i, flat // self.nc], scores[..., None], (flat % self.nc)[..., None].float()], dim=-1
        )


@odd(image(3, 64, 64))
class HybridEncoder(nn.Module):
    """RT-DETR: a transformer layer with 2-D positions on the coarsest map, a feature pyramid, queries by topk."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body, self.down = body(16), nn.ModuleList(Conv(16, 16, 3, 2) for _ in range(2))
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, activation="gelu", batch_first=True)
        self.laterals, self.fpn = (
            nn.ModuleList(Conv(16, 16) for _ in range(2)),
            nn.ModuleList(Conv(32, 16, 3) for _ in range(2)),
        )
        self.norm, self.score, self.box = nn.LayerNorm(width), nn.Linear(width, 5), nn.Linear(width, 4)

    @staticmethod
    def positions(w: int, h: int, width: int) -> Tensor:
        """Returns sines and cosines of both coordinates, [1, h * w, width]."""
        grid_w, grid_h = torch.meshgrid(torch.arange(w).float(), torch.arange(h).float(), indexing="ij")
        omega = 1.0 / 10000.0 ** (torch.arange(width // 4).float() / (width // 4))
        parts = [one.flatten()[..., None] @ omega[None] for one in (grid_w, grid_h)]
        return torch.cat([f(part) for part in parts for f in (torch.sin, torch.cos)], dim=1)[None]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = [self.body(x)]
        for down in self.down:
            maps.append(down(maps[-1]))
        h, w = maps[-1].shape[2:]
        top = maps[-1].flatten(2).permute(0, 2, 1) + self.positions(w, h, 16).to(x.device)
        inner = [self.layer(top).permute(0, 2, 1).reshape(-1, 16, h, w).contiguous()]
        for i in range(2):
            high = inner[0] = self.laterals[i](inner[0])
            up = F.interpolate(high, scale_factor=2.0, mode="nearest")
            inner.insert(0, self.fpn[i](torch.concat([up, maps[1 - i]], dim=1)))
        memory = torch.concat([one.flatten(2).permute(0, 2, 1) for one in inner], 1)
        memory = self.norm(memory)
        logits = self.score(memory)
        _, best = torch.topk(logits.max(-1).values, 8, dim=1)
        target = memory.gather(dim=1, index=best.unsqueeze(-1).expand(-1, -1, memory.shape[-1]))
        return self.score(target), self.box(target).sigmoid()


@odd(image(3, 32, 32))
class FineDistributions(nn.Module):
    """D-FINE: distances as distributions over uneven bins, refined by each layer; quality from top probabilities."""

    def __init__(self, width: int = 16, bins: int = 8) -> None:
        super().__init__()
        self.bins, self.body, self.queries = bins, body(width), nn.Embedding(6, width)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 2, 32, batch_first=True) for _ in range(2)
        )
        self.corners = nn.ModuleList(nn.Linear(width, 4 * (bins + 1)) for _ in range(2))
        self.quality, self.score, self.start = nn.Linear(4 * 3, 1), nn.Linear(width, 5), nn.Linear(width, 4)
        self.up, self.scale = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.tensor([4.0]))

    def weights(self) -> Tensor:
        """Returns the distances of the bins, computed from learned parameters."""
        upper = abs(self.up[0]) * abs(self.scale)
        step = (upper + 1) ** (2 / (self.bins - 2))
        left = [-((step) ** i) + 1 for i in range(self.bins // 2 - 1, 0, -1)]
        right = [(step) ** i - 1 for i in range(1, self.bins // 2)]
        return torch.cat([-upper * 2, *left, torch.zeros_like(upper), *right, upper * 2], 0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.body(x).flatten(2).mT
        y, project = self.queries.weight.expand(x.shape[0], -1, -1), self.weights()
        total: Tensor | float = 0.0
        boxes = self.start(y).sigmoid()
        for layer, head in zip(self.layers, self.corners, strict=True):
            y = layer(y, memory)
            total = head(y) + total
        corners = total.unflatten(-1, (4, self.bins + 1)) if isinstance(total, Tensor) else boxes
        prob = F.softmax(corners, dim=-1)
        distance = F.linear(prob, project.reshape(1, -1)).squeeze(-1)
        top, _ = prob.topk(2, dim=-1)
        stat = torch.cat([top, top.mean(dim=-1, keepdim=True)], dim=-1)
        centre, size = boxes.chunk(2, -1)
        low = centre - (0.5 * 4.0 + distance[..., :2]) * (size / 4.0)
        high = centre + (0.5 * 4.0 + distance[..., 2:]) * (size / 4.0)
        return self.score(y) + self.quality(stat.flatten(2)), torch.cat([(low + high) / 2, high - low], -1)
