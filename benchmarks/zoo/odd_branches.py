"""Logic that is constant once the size of the input is known: branches, loops, assertions, type tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector

odd = List("odd")
ENTRIES = odd.entries


def body(channels: int = 16) -> nn.Sequential:
    """Returns two convolutions, [N, 3, H, W] to [N, channels, H/4, W/4]."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, channels, 3, 2, 1), nn.ReLU()
    )


@odd(image(3, 32, 32))
class BranchOnSize(nn.Module):
    """A pool that is applied only if the feature map is wider than 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pool, self.head = body(), nn.MaxPool2d(2), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if x.shape[-1] > 4:
            x = self.pool(x)
        return self.head(x.mean((2, 3)))


@odd(image(3, 32, 32))
class IsTensor(nn.Module):
    """A branch on `isinstance(x, torch.Tensor)`, as in blocks that accept a tensor or a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.many = body(), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        features = self.body(x)
        found = self.one(features) if isinstance(features, torch.Tensor) else self.many(features)
        if not torch.is_tensor(found):
            found = found[0]
        return self.head(found.mean((2, 3)))


@odd(image(3, 32, 32))
class AssertSize(nn.Module):
    """An assertion of the input's size, and its unpacked shape, as in patch embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Conv2d(3, 32, 8, 8), nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        assert height == 32 and width == 32, f"{height}x{width} is not 32x32"
        assert channels == 3
        tokens = self.embed(x).reshape(batch, 32, -1).transpose(1, 2)
        return self.head(self.norm(tokens).mean(1))


@odd(image(3, 30, 30))
class PadToMultiple(nn.Module):
    """Padding to the next multiple of 8 and cropping again, as in window attention and segmentation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        below, right = (8 - height % 8) % 8, (8 - width % 8) % 8
        if below > 0 or right > 0:
            x = F.pad(x, (0, right, 0, below))
        return self.second(F.relu(self.first(x)))[:, :, :height, :width]


@odd(image(3, 32, 32))
class LoopOverRows(nn.Module):
    """A loop over a size: each row of the feature map goes through one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.row, self.head = body(), nn.Linear(16 * 8, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        rows = [F.relu(self.row(x[:, :, i].flatten(1))) for i in range(x.size(2))]
        return self.head(torch.stack(rows, 1).sum(1))


@odd(vector(12, 16))
class RankBranch(nn.Module):
    """Branches on `x.ndim`, `x.dim()` and `len(x.shape)`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            x = x.unsqueeze(1)
        x = F.gelu(self.first(x))
        if x.dim() == 3 and len(x.shape) == 3:
            x = x.mean(1)
        return self.second(x)


@odd(image(3, 32, 32))
class SizeArithmetic(nn.Module):
    """Adaptive pooling by hand: kernel and stride are computed from the size of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        stride = math.floor(x.shape[-1] / 3)
        kernel = x.shape[-1] - 2 * stride
        return self.head(F.avg_pool2d(x, kernel, stride).flatten(1))


@odd(image(3, 32, 32))
class ViewByNumel(nn.Module):
    """Sizes from `numel`, `size()` and integer division."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x.view(x.size(0), x.numel() // x.size()[0]))


@odd(image(3, 32, 32))
class DtypeAndDevice(nn.Module):
    """A grid of coordinates with the dtype and device of the input (CoordConv)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(5, 16, 3, 2, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        ys = torch.linspace(-1, 1, height, device=x.device, dtype=x.dtype)
        xs = torch.linspace(-1, 1, width, device=x.device, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(ys, xs, indexing="ij")).expand(batch, -1, -1, -1)
        if x.dtype == torch.float16:
            grid = grid.half()
        return self.head(F.relu(self.conv(torch.cat([x, grid], 1))).mean((2, 3)))


@odd(image(3, 32, 32))
class TrainingBranch(nn.Module):
    """An auxiliary branch only in training mode, after `if self.training`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aux, self.head = body(), nn.Conv2d(16, 16, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.training:
            x = x + 0.1 * self.aux(x)
        return self.head(x.mean((2, 3)))


@odd(image(3, 33, 47))
class UpToSkip(nn.Module):
    """`F.interpolate` to the size of another tensor (odd and not square)."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.lateral, self.out = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.down1(x))
        second = self.lateral(F.relu(self.down2(first)))
        if second.shape[-2:] != first.shape[-2:]:
            second = F.interpolate(second, size=first.shape[-2:], mode="bilinear", align_corners=False)
        return F.interpolate(self.out(first + second), size=x.shape[2:], mode="nearest")


@odd(image(3, 32, 32))
class TryExcept(nn.Module):
    """A shape that is compared with a tuple, formatted into an error and kept in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 10)
        self.seen: dict[str, tuple[int, ...]] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.seen["body"] = tuple(x.shape)
        if tuple(x.shape[1:]) != (16, 8, 8):
            raise ValueError(f"expected 16x8x8, got {'x'.join(str(s) for s in x.shape[1:])}")
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


@odd(vector(7, 16))
class PositionsFromLength(nn.Module):
    """Sinusoidal positions computed in `forward` from the length, and a cache by length."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(16, 32), nn.Linear(32, 5)
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.cache:
            place = torch.arange(length, device=x.device).unsqueeze(1)
            rate = torch.exp(torch.arange(0, 32, 2, device=x.device) * (-math.log(100.0) / 32))
            table = torch.zeros(length, 32, device=x.device)
            table[:, 0::2], table[:, 1::2] = torch.sin(place * rate), torch.cos(place * rate)
            self.cache[length] = table
        return self.head(F.relu(self.project(x) + self.cache[length]).mean(1))
