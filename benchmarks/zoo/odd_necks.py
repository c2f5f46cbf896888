"""Parts of detectors and segmentation models: YOLO blocks and heads, feature pyramids, ASPP, box decoders."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image
from zoo.odd_vision import block

odd = List("odd")
ENTRIES = odd.entries


class _Conv(nn.Module):
    """The unit of YOLO: Conv, BatchNorm and SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(outputs), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class _Bottleneck(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = _Conv(channels, channels, 3), _Conv(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cv2(self.cv1(x))


class _C2f(nn.Module):
    """C2f: a list of the halves of a split, to which each block appends its output; the list is concatenated."""

    def __init__(self, inputs: int, outputs: int, count: int = 1) -> None:
        super().__init__()
        self.width = outputs // 2
        self.cv1, self.cv2 = _Conv(inputs, outputs), _Conv((2 + count) * self.width, outputs)
        self.m = nn.ModuleList(_Bottleneck(self.width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class _Sppf(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cv1, self.cv2, self.m = (
            _Conv(channels, channels // 2),
            _Conv(channels * 2, channels),
            nn.MaxPool2d(5, 1, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = [self.cv1(x)]
        y.extend(self.m(y[-1]) for _ in range(3))
        return self.cv2(torch.cat(y, 1))


class _Concat(nn.Module):
    def forward(self, x: list[Tensor]) -> Tensor:
        return torch.cat(x, 1)


class _Dfl(nn.Module):
    """Expected distances: a softmax over bins, then a fixed 1x1 convolution."""

    def __init__(self, bins: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(bins, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.data[:] = torch.arange(bins, dtype=torch.float).view(1, bins, 1, 1)
        self.bins = bins

    def forward(self, x: Tensor) -> Tensor:
        b, _, a = x.shape
        return self.conv(x.view(b, 4, self.bins, a).transpose(2, 1).softmax(1)).view(b, 4, a)


def _anchors(features: list[Tensor], strides: list[int]) -> tuple[Tensor, Tensor]:
    """Returns the centres of all cells, [2, cells], and their strides, [1, cells]."""
    points, steps = [], []
    for feature, stride in zip(features, strides, strict=True):
        _, _, h, w = feature.shape
        ys, xs = torch.arange(h, dtype=feature.dtype) + 0.5, torch.arange(w, dtype=feature.dtype) + 0.5
        grid_y, grid_x = torch.meshgrid(ys, xs, indexing="ij")
        points.append(torch.stack((grid_x, grid_y), -1).view(-1, 2))
        steps.append(torch.full((h * w, 1), float(stride), dtype=feature.dtype))
    return torch.cat(points).t(), torch.cat(steps).t()


class _Detect(nn.Module):
    def __init__(self, classes: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.classes, self.strides = classes, [8, 16]
        self.cv2 = nn.ModuleList(nn.Sequential(_Conv(c, 16, 3), nn.Conv2d(16, 16, 1)) for c in channels)
        self.cv3 = nn.ModuleList(nn.Sequential(_Conv(c, 16, 3), nn.Conv2d(16, classes, 1)) for c in channels)
        self.dfl = _Dfl()

    def forward(self, x: list[Tensor]) -> Tensor | list[Tensor]:
        for i in range(len(x)):
            x[i] = torch.cat((self.cv2[i](x[i]), self.cv3[i](x[i])), 1)
        if self.training:
            return x
        batch = x[0].shape[0]
        joined = torch.cat([xi.view(batch, 16 + self.classes, -1) for xi in x], 2)
        box, scores = joined.split((16, self.classes), 1)
        points, steps = _anchors(x, self.strides)
        near, far = self.dfl(box).chunk(2, 1)
        corner1, corner2 = points.unsqueeze(0) - near, points.unsqueeze(0) + far
        boxes = torch.cat(((corner1 + corner2) / 2, corner2 - corner1), 1) * steps
        return torch.cat((boxes, scores.sigmoid()), 1)


@odd(image(3, 64, 64))
class YoloV8(nn.Module):
    """A small YOLOv8: C2f blocks with lists of chunks, SPPF, a PAN neck, a decoding head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_Conv(3, 8, 3, 2), _Conv(8, 16, 3, 2), _C2f(16, 16))
        self.p3, self.p4 = (
            nn.Sequential(_Conv(16, 32, 3, 2), _C2f(32, 32)),
            nn.Sequential(_Conv(32, 32, 3, 2), _Sppf(32)),
        )
        self.up, self.cat = nn.Upsample(None, 2, "nearest"), _Concat()
        self.n3, self.down, self.n4 = _C2f(64, 32), _Conv(32, 32, 3, 2), _C2f(64, 32)
        self.detect = _Detect(5, (32, 32))

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        three = self.p3(self.stem(x))
        four = self.p4(three)
        n3 = self.n3(self.cat([self.up(four), three]))
        n4 = self.n4(self.cat([self.down(n3), four]))
        return self.detect([n3, n4])


class _DetectV5(nn.Module):
    """The head of YOLOv5: a cached grid that is rebuilt for other sizes, and decoding by a split of the last axis."""

    def __init__(self, classes: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.outputs, self.strides = classes + 5, (8.0, 16.0)
        self.grid = [torch.empty(0) for _ in channels]
        self.register_buffer(
            "anchors", torch.tensor([[[1.0, 2], [2, 1], [3, 3]], [[2.0, 3], [3, 2], [4, 4]]])
        )
        self.anchors: Tensor
        self.m = nn.ModuleList(nn.Conv2d(c, self.outputs * 3, 1) for c in channels)

    def forward(self, x: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        z = []
        for i, conv in enumerate(self.m):
            x[i] = conv(x[i])
            bs, _, ny, nx = x[i].shape
            x[i] = x[i].view(bs, 3, self.outputs, ny, nx).permute(0, 1, 3, 4, 2).contiguous()
            if self.grid[i].shape[2:4] != x[i].shape[2:4]:
                ys, xs = torch.meshgrid(torch.arange(ny), torch.arange(nx), indexing="ij")
                self.grid[i] = torch.stack((xs, ys), 2).expand(1, 3, ny, nx, 2).float() - 0.5
            xy, wh, conf = x[i].sigmoid().split((2, 2, self.outputs - 4), 4)
            xy = (xy * 2 + self.grid[i]) * self.strides[i]
            wh = (wh * 2) ** 2 * self.anchors[i].view(1, 3, 1, 1, 2) * self.strides[i]
            z.append(torch.cat((xy, wh, conf), 4).view(bs, 3 * nx * ny, self.outputs))
        return torch.cat(z, 1), x


@odd(image(3, 64, 64))
class YoloV5(nn.Module):
    """A small YOLOv5: Focus by strided slices, two feature maps, decoded and raw outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.focus, self.one, self.two = (
            _Conv(12, 16, 3),
            nn.Sequential(_Conv(16, 16, 3, 2), _Conv(16, 16, 3, 2)),
            _Conv(16, 32, 3, 2),
        )
        self.head = _DetectV5(3, (16, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1)
        three = self.one(self.focus(x))
        return self.head([three, self.two(three)])


@odd(image(3, 64, 64))
class FpnDict(nn.Module):
    """A feature pyramid that iterates over dicts and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({"c2": block(3, 16, 2), "c3": block(16, 32, 2), "c4": block(32, 64, 2)})
        self.lateral = nn.ModuleDict(
            {"c2": nn.Conv2d(16, 16, 1), "c3": nn.Conv2d(32, 16, 1), "c4": nn.Conv2d(64, 16, 1)}
        )
        self.smooth = nn.ModuleDict({key: nn.Conv2d(16, 16, 3, padding=1) for key in ("c2", "c3", "c4")})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = {}
        for key, stage in self.stages.items():
            x = stage(x)
            maps[key] = x
        last, out = None, {}
        for key in reversed(maps):
            here = self.lateral[key](maps[key])
            last = here if last is None else here + F.interpolate(last, size=here.shape[-2:], mode="nearest")
            out[key.replace("c", "p")] = self.smooth[key](last)
        return out


@odd(image(3, 64, 64))
class BiFpn(nn.Module):
    """BiFPN (EfficientDet): fast normalized fusion, with weights after a ReLU, divided by their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = block(3, 16, 2), block(16, 16, 2), block(16, 16, 2)
        self.w1, self.w2 = nn.Parameter(torch.ones(2)), nn.Parameter(torch.tensor([1.0, 0.5, 0.2]))
        self.td, self.out = (
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.one(x)
        second = self.two(first)
        third = self.three(second)
        w1 = F.relu(self.w1)
        w1 = w1 / (w1.sum() + 1e-4)
        middle = self.td(F.silu(w1[0] * second + w1[1] * F.interpolate(third, scale_factor=2)))
        w2 = F.relu(self.w2)
        w2 = w2 / (torch.sum(w2, dim=0) + 1e-4)
        out = self.out(F.silu(w2[0] * second + w2[1] * middle + w2[2] * F.max_pool2d(first, 3, 2, 1)))
        return middle, out


@odd(image(3, 64, 64))
class Aspp(nn.Module):
    """ASPP (DeepLab): dilated branches, and a pooled branch that is upsampled again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, 16, 2), block(16, 32, 2))
        self.branches = nn.ModuleList(
            [nn.Conv2d(32, 16, 1), *(nn.Conv2d(32, 16, 3, padding=d, dilation=d) for d in (2, 4))]
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 16, 1), nn.ReLU())
        self.project, self.out = block(64, 16), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stem(x)
        size = features.shape[-2:]
        parts = [F.relu(branch(features)) for branch in self.branches]
        parts.append(F.interpolate(self.pool(features), size=size, mode="bilinear", align_corners=False))
        out = self.out(self.project(torch.cat(parts, dim=1)))
        return F.interpolate(out, size=x.shape[-2:], mode="bilinear", align_corners=True)


@odd(image(3, 64, 64))
class PyramidPooling(nn.Module):
    """PSPNet: adaptive pools to 1, 2, 3 and 6 cells (sizes that do not all divide the input)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, 16, 2), block(16, 16, 2))
        self.stages = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(s), nn.Conv2d(16, 4, 1)) for s in (1, 2, 3, 6)
        )
        self.out = nn.Conv2d(32, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        up = [
            F.interpolate(s(x), size=(x.size(2), x.size(3)), mode="bilinear", align_corners=True)
            for s in self.stages
        ]
        return self.out(torch.cat([x, *up], 1))


@odd(image(3, 64, 64))
class SsdHead(nn.Module):
    """SSD: feature maps become rows of boxes by permute and view, concatenated over levels; priors as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Sequential(block(3, 16, 2), block(16, 32, 2), block(32, 32, 2)),
            block(32, 32, 2),
        )
        self.loc = nn.ModuleList(nn.Conv2d(32, 2 * 4, 3, padding=1) for _ in range(2))
        self.conf = nn.ModuleList(nn.Conv2d(32, 2 * 6, 3, padding=1) for _ in range(2))
        self.register_buffer("priors", torch.rand(2 * (64 + 16), 4))
        self.priors: Tensor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.one(x)
        maps = [first, self.two(first)]
        loc = [
            m(f).permute(0, 2, 3, 1).contiguous().view(f.size(0), -1)
            for m, f in zip(self.loc, maps, strict=True)
        ]
        conf = [
            m(f).permute(0, 2, 3, 1).reshape(f.size(0), -1, 6) for m, f in zip(self.conf, maps, strict=True)
        ]
        offsets = torch.cat(loc, 1).view(x.size(0), -1, 4)
        centres = self.priors[:, :2] + offsets[..., :2] * 0.1 * self.priors[:, 2:]
        sizes = self.priors[:, 2:] * torch.exp((offsets[..., 2:] * 0.2).clamp(max=3.0))
        boxes = torch.cat([centres - sizes / 2, centres + sizes / 2], -1)
        return {"boxes": boxes, "scores": torch.cat(conf, 1).softmax(-1)}


@odd(image(3, 64, 64))
class CenterNet(nn.Module):
    """The heads of CenterNet: a clamped heat map, and a list with one dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, 16, 2), block(16, 32, 2))
        self.heads = nn.ModuleDict(
            {
                k: nn.Sequential(block(32, 16), nn.Conv2d(16, c, 1))
                for k, c in (("hm", 4), ("wh", 2), ("reg", 2))
            }
        )

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        x = self.stem(x)
        out = {name: head(x) for name, head in self.heads.items()}
        out["hm"] = out["hm"].sigmoid().clamp(min=1e-4, max=1 - 1e-4)
        return [out]
