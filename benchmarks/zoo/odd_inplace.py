"""Models that change values in place: through a slice, a view, an alias, a buffer, or an operator ending in "_"."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


@odd(image(3, 32, 32))
class SliceAssign(nn.Module):
    """Channels shifted by one pixel, by writing into slices of zeros (as TSM does along time)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = body(), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        out = torch.zeros_like(x)
        out[:, :4, :, :-1] = x[:, :4, :, 1:]
        out[:, 4:8, :, 1:] = x[:, 4:8, :, :-1]
        out[:, 8:] = x[:, 8:]
        return self.head(F.relu(self.conv(out)).mean((2, 3)))


@odd(image(3, 32, 32))
class ViewChanged(nn.Module):
    """A view that is changed in place before its base is read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = body(), nn.Conv2d(16, 16, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        first = x[:, :8]
        first.mul_(0.5)
        return self.head(self.conv(x).relu_().mean((2, 3)))


@odd(image(3, 32, 32))
class AliasChanged(nn.Module):
    """Two names for one tensor: `y = x; y += 1` changes x too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = body(), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        same = x
        same += 1.0
        return self.head((self.conv(same) + x).mean((2, 3)))


@odd(image(3, 32, 32))
class ReshapeChanged(nn.Module):
    """A reshape that is a view, changed in place after its base was read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        before = x.mean((2, 3))
        flat = x.reshape(x.shape[0], 16, -1)
        flat[:, :, ::2] = 0.0
        flat.clamp_(max=2.0)
        return self.head(before + x.amax((2, 3)))


@odd(image(3, 32, 32))
class ChunkChanged(nn.Module):
    """The views of a chunk, changed in place before the whole tensor is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        gate, value = x.chunk(2, dim=1)
        gate.sigmoid_()
        value *= gate
        return self.head(x.mean((2, 3)))


@odd(image(3, 32, 32))
class InplaceResidual(nn.Module):
    """`out += identity` and in-place activations everywhere, as in torchvision's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one = body(), nn.Conv2d(16, 16, 3, padding=1)
        self.two, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        out = F.relu(self.one(x), inplace=True)
        out = F.leaky_relu_(self.two(out), 0.1)
        out += x
        out.relu_()
        return self.head(out.mean((2, 3)))


@odd(image(3, 32, 32))
class PasteSum(nn.Module):
    """`y[...] += z`: an overlap-add of shifted feature maps."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = body(), nn.Conv2d(16, 16, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.body(x))
        out = x.new_zeros(x.shape[0], 16, 10, 10)
        for i in range(3):
            for j in range(3):
                out[:, :, i : i + 8, j : j + 8] += x * (0.1 * (i + 1))
        return self.head(out.mean((2, 3)))


@odd(image(3, 32, 32))
class FillMasked(nn.Module):
    """`masked_fill_` with a mask computed from the values, and `where` with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = body(), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.body(x))
        x.masked_fill_(x < -0.2, -0.2)
        x = torch.where(x > 1.5, torch.full_like(x, 1.5), x)
        return self.head(x.mean((2, 3)))


@odd(image(3, 32, 32))
class ZeroBorder(nn.Module):
    """A border set to zero on a clone; the original is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = body(), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        inner = x.clone()
        inner[..., 0], inner[..., -1] = 0, 0
        inner[:, :, [0, -1]] = 0
        return self.head((self.conv(inner) - x).mean((2, 3)))


@odd(vector(6, 24))
class WriteSteps(nn.Module):
    """A recurrence that writes its steps into a tensor: `out[:, t] = state`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state, self.head = nn.Linear(24, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], x.shape[1], 16)
        state = torch.zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            state = torch.tanh(self.inner(x[:, t]) + self.state(state))
            out[:, t] = state
        return self.head(out)


@odd(image(3, 32, 32))
class TransposedView(nn.Module):
    """In-place changes of shape (`squeeze_`, `unsqueeze_`), and a write to a permuted view."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        last = x.permute(0, 2, 3, 1)
        last[..., :4] = last[..., :4] * 2.0
        pooled = x.mean(2).unsqueeze_(2)
        return self.head(pooled.mean(3).squeeze_(2))


@odd(image(3, 32, 32))
class OutArgument(nn.Module):
    """`index_copy_` on a clone, and `torch.add` with `alpha`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 10)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2]))
        self.order: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).mean((2, 3))
        mixed = x.clone()
        mixed.index_copy_(1, self.order, x[:, 4:8])
        return self.head(torch.add(mixed, x, alpha=0.5))


@odd(image(3, 32, 32))
class RunningBuffer(nn.Module):
    """A counter of calls and a running mean, both buffers that change in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 10)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.zeros(()))
        self.mean: Tensor
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
            self.calls += 1
        return self.head((x - self.mean[:, None, None]).relu().mean((2, 3)))
