"""Re-parameterized blocks as published: several branches in training, one convolution in deployment.

The blocks differ in how they get the merged convolution in evaluation, if at all; their names in `BLOCKS` say how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from chain import settle
from torch import Tensor, nn
from torch.nn import functional as F


def conv_norm(inputs: int, outputs: int, kernel: int, **settings: Any) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **settings)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Returns the kernel and bias that a convolution and its BatchNorm fold into."""
    assert norm.running_var is not None and norm.running_mean is not None
    factor = norm.weight / (norm.running_var + norm.eps).sqrt()
    return conv.weight * factor.view(-1, 1, 1, 1), norm.bias - norm.running_mean * factor


class Branches(nn.Module):
    """The sum of a 3x3 and a 1x1 convolution and, if shapes allow, the input, each with a BatchNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.stride, self.groups = stride, groups
        self.wide = conv_norm(inputs, outputs, 3, stride=stride, groups=groups)
        self.point = conv_norm(inputs, outputs, 1, stride=stride, groups=groups)
        self.skip = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None

    def branches(self, x: Tensor) -> Tensor:
        y: Tensor = self.wide(x) + self.point(x)
        return y if self.skip is None else y + self.skip(x)

    def merged(self) -> tuple[Tensor, Tensor]:
        kernel, bias = folded(*self.wide)
        other, more = folded(*self.point)
        kernel, bias = kernel + F.pad(other, (1, 1, 1, 1)), bias + more
        if self.skip is not None:
            channels = len(kernel)
            eye = nn.Conv2d(channels, channels, 1, groups=self.groups, bias=False)
            nn.init.dirac_(eye.weight, self.groups)
            other, more = folded(eye, self.skip)
            kernel, bias = kernel + F.pad(other, (1, 1, 1, 1)), bias + more
        return kernel, bias

    def convolved(self, x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, kernel, bias, self.stride, 1, groups=self.groups)


class Always(Branches):
    """Evaluates all branches; merging them is left to the user."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branches(x))


class Cached(Branches):
    """Merges the kernel once, when it leaves training mode."""

    kernel: tuple[Tensor, Tensor]

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if not mode:
            with torch.no_grad():
                self.kernel = self.merged()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branches(x) if self.training else self.convolved(x, *self.kernel))


class Parameters(Branches):
    """Overwrites the frozen parameters of a second convolution at each call in evaluation mode."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, stride, groups)
        self.deployed = nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.relu(self.branches(x))
        kernel, bias = self.merged()
        self.deployed.weight.data, self.deployed.bias.data = kernel.detach(), bias.detach()  # type: ignore[union-attr]
        return F.relu(self.deployed(x))


class Swapped(Branches):
    """Switches its forward by a flag of its own instead of `self.training`."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, stride, groups)
        self.run: Callable[[Tensor], Tensor] = self.branches

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.deployed = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "deployed", False):
            with torch.no_grad():
                kernel, bias = self.merged()
            return F.relu(self.convolved(x, kernel, bias))
        return F.relu(self.branches(x))


class Computing(Branches):
    """Computes the merged kernel from the parameters of the branches at each call, as ECBSR's blocks do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branches(x) if self.training else self.convolved(x, *self.merged()))


class Chain(nn.Module):
    """A sequence of a 1x1, a 3x3 and a 1x1 convolution, padded only at its start, in parallel with a 1x1."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.beside = nn.Conv2d(inputs, outputs, 1, stride, groups=groups)
        self.first = nn.Conv2d(inputs, 2 * inputs, 1, groups=groups)
        self.middle = nn.Conv2d(2 * inputs, 2 * outputs, 3, stride, groups=groups)
        self.last = nn.Conv2d(2 * outputs, outputs, 1, groups=groups)
        self.deployed = nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups).requires_grad_(False)
        self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Reads the merged kernel off the chain's responses to unit impulses, independently of qatkit."""
        conv = self.deployed
        per_group, groups = conv.weight.shape[1], conv.groups
        ones = torch.eye(per_group).repeat(1, groups).view(per_group, per_group * groups, 1, 1)
        whole = self.chained(F.pad(ones, (2, 2, 2, 2)), (1, 1))
        nothing = self.chained(torch.zeros(1, per_group * groups, 3, 3), (1, 1))
        kernel = (whole - nothing).flip(2, 3).transpose(0, 1)
        conv.weight.data = kernel + F.pad(self.beside.weight, (1, 1, 1, 1))
        assert conv.bias is not None and self.beside.bias is not None
        conv.bias.data = nothing.flatten() + self.beside.bias

    def chained(self, x: Tensor, stride: tuple[int, ...]) -> Tensor:
        middle = self.middle
        y = F.conv2d(self.first(x), middle.weight, middle.bias, stride, groups=middle.groups)
        result: Tensor = self.last(y)
        return result

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if not mode:
            self.merge()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.leaky_relu(self.deployed(x), 0.05)
        y = self.last(self.middle(self.first(F.pad(x, (1, 1, 1, 1))))) + self.beside(x)
        return F.leaky_relu(y, 0.05)


class Net(nn.Module):
    """A convolution, three blocks (plain, strided and grouped) and a classifier."""

    def __init__(self, block: Callable[..., nn.Module], channels: int = 8) -> None:
        super().__init__()
        self.stem = conv_norm(3, channels, 3, stride=2)
        self.one, self.two = block(channels, channels), block(channels, 2 * channels, stride=2)
        self.three = block(2 * channels, 2 * channels, groups=2)
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.three(self.two(self.one(F.relu(self.stem(x)))))
        result: Tensor = self.head(y.mean((2, 3)))
        return result


BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "cached kernel": Cached,
    "frozen parameters": Parameters,
    "flag of its own": Swapped,
    "computed kernel": Computing,
    "chain": Chain,
    "all branches": Always,
}


def branched(name: str, channels: int = 8) -> nn.Module:
    """Returns a network of the named blocks with realistic BatchNorm statistics."""
    torch.manual_seed(0)
    return settle(Net(BLOCKS[name], channels), 3, 32, 32)
