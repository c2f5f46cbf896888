"""Less common layers: norms, activations, pads, pools, hooks, custom functions, number types."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector
from zoo.odd_branches import body
from zoo.odd_weights import Plain

odd = List("odd")
ENTRIES = odd.entries


class _Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(*layers: nn.Module) -> nn.Module:
    """Returns a model with a convolution before each layer."""
    mixed = [part for layer in layers for part in (nn.Conv2d(16, 16, 3, padding=1), layer)]
    return Plain(nn.Sequential(*mixed))


@odd(image(3, 32, 32))
def activations_modules() -> nn.Module:
    """Mish, SELU, CELU, GELU(tanh), Hardtanh, Softplus, Softsign, LogSigmoid, Threshold and the shrink modules."""
    return between(nn.Mish(), nn.SELU(), nn.CELU(), nn.GELU("tanh"), nn.Hardtanh(-2, 2), nn.Softplus(), nn.Softsign(),
                   nn.LogSigmoid(), nn.Tanhshrink(), nn.Threshold(0.1, 0.0),
                   nn.Softshrink(0.1), nn.Hardshrink(0.1))  # fmt: skip


@odd(image(3, 32, 32))
def activations_functions() -> nn.Module:
    """Activations as functions and by hand: mish, hard swish and sigmoid, two GELUs, clamp, erf, squared ReLU."""

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3))))

    return between(
        _Lambda(F.mish), _Lambda(lambda x: x * F.relu6(x + 3) / 6), _Lambda(lambda x: x * torch.sigmoid(1.702 * x)),
        _Lambda(gelu), _Lambda(F.hardsigmoid), _Lambda(F.hardswish), _Lambda(lambda x: x * torch.tanh(F.softplus(x))),
        _Lambda(lambda x: torch.clamp(x, -1, 1.5)), _Lambda(torch.erf), _Lambda(lambda x: F.relu(x) ** 2),
    )  # fmt: skip


class _Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(16, 1, 1) * 1.3)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


@odd(image(3, 32, 32))
def learned_activations() -> nn.Module:
    """Per-channel PReLU, swish with a learned beta, RReLU, a GLU over channels."""
    return Plain(nn.Sequential(nn.Conv2d(16, 16, 1), nn.PReLU(16), nn.Conv2d(16, 16, 1), _Swish(), nn.Conv2d(16, 16, 1),
                               nn.RReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.GLU(dim=1)))  # fmt: skip


class _MemoryEfficient(torch.autograd.Function):
    """Swish with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns x times its sigmoid."""
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Returns `grad` times the derivative of x · sigmoid(x)."""
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * gate * (1 + x * (1 - gate))


@odd(image(3, 32, 32))
def custom_autograd() -> nn.Module:
    """A `torch.autograd.Function` (memory-efficient swish)."""
    return between(_Lambda(_MemoryEfficient.apply), _Lambda(_MemoryEfficient.apply))


@torch.jit.script
def _scripted_swish(x: Tensor) -> Tensor:
    return x.mul(x.sigmoid())


@odd(image(3, 32, 32))
def scripted_function() -> nn.Module:
    """A function decorated with `@torch.jit.script`."""
    return between(_Lambda(_scripted_swish), _Lambda(_scripted_swish))


class _Grn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = (
            nn.Parameter(torch.ones(1, 16, 1, 1) * 0.5),
            nn.Parameter(torch.zeros(1, 16, 1, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        size = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
        return self.gamma * (x * (size / (size.mean(dim=1, keepdim=True) + 1e-6))) + self.beta + x


class _ChannelNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - u) / torch.sqrt(s + 1e-6)) + self.bias[:, None, None]


@odd(image(3, 32, 32))
def norms() -> nn.Module:
    """GRN, LayerNorm over channels by hand, GroupNorm, InstanceNorm, LocalResponseNorm."""
    return between(
        _Grn(),
        _ChannelNorm(),
        nn.GroupNorm(4, 16),
        nn.InstanceNorm2d(16, affine=True),
        nn.LocalResponseNorm(5),
    )


@odd(image(3, 32, 32))
def functional_norms() -> nn.Module:
    """Functions without weights: layer norm (over C, H, W), group, instance and local response norm, `F.normalize`."""
    return between(
        _Lambda(lambda x: F.layer_norm(x, x.shape[1:])), _Lambda(lambda x: F.group_norm(x, 2)),
        _Lambda(F.instance_norm), _Lambda(lambda x: F.normalize(x, dim=1) * 4),
        _Lambda(lambda x: F.local_response_norm(x, 3)),
    )  # fmt: skip


class _FrozenNorm(nn.Module):
    """BatchNorm with fixed statistics, by hand (Detectron)."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("weight", 1.2), ("bias", 0.1), ("running_mean", 0.05), ("running_var", 0.8)):
            self.register_buffer(name, torch.full((16,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


@odd(image(3, 32, 32))
def frozen_norms() -> nn.Module:
    """Frozen BatchNorm by hand and from torchvision, SyncBatchNorm, BatchNorm with and without weights."""
    return between(_FrozenNorm(), torchvision.ops.FrozenBatchNorm2d(16), nn.SyncBatchNorm(16),
                   nn.BatchNorm2d(16, affine=False), nn.BatchNorm2d(16))  # fmt: skip


@odd(image(3, 33, 33))
def pads() -> nn.Module:
    """Padding of Conv2d ("same", reflect, circular), by modules (replicate, constant) and by `F.pad`."""
    return Plain(nn.Sequential(
        nn.Conv2d(16, 16, 4, padding="same"), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
        nn.ReplicationPad2d(1), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"),
        nn.ConstantPad2d((0, 1, 0, 1), 0.0), nn.Conv2d(16, 16, 3, 2), _Lambda(lambda x: F.pad(x, (1, 1), value=0.5)),
        nn.Conv2d(16, 16, (1, 3)),
    ))  # fmt: skip


@odd(image(3, 45, 37))
def pools() -> nn.Module:
    """Pooling: ceil_mode, count_include_pad=False, Lp, and adaptive to sizes that need not divide the input's."""
    return Plain(nn.Sequential(
        nn.Conv2d(16, 16, 1), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(16, 16, 1),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), nn.Conv2d(16, 16, 1), nn.AdaptiveMaxPool2d(2),
        nn.Conv2d(16, 16, 1), nn.LPPool2d(2, 1), nn.AdaptiveAvgPool2d((2, 1)),
    ))  # fmt: skip


class _Hooked(nn.Module):
    """A hook that scales an output, a pre-hook that shifts an input, and a hook that stores an output for later use."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.kept: dict[str, Tensor] = {}
        self.one.register_forward_hook(lambda module, args, output: output * 1.5)
        self.two.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        self.one.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Keeps the output of the module."""
        self.kept["one"] = output

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.two(F.relu(self.one(x)))) + self.kept["one"].mean((2, 3), keepdim=True)


@odd(image(3, 32, 32))
def hooks() -> nn.Module:
    """Hooks that change or store the inputs and outputs of modules."""
    return Plain(_Hooked())


class _Tree(nn.Module):
    """A recursive tree of convolutions (DLA)."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.left = _Tree(depth - 1) if depth > 1 else nn.Conv2d(16, 16, 3, padding=1)
        self.right = _Tree(depth - 1) if depth > 1 else nn.Conv2d(16, 16, 3, padding=1)
        self.root = nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = F.relu(self.left(x))
        return self.root(torch.cat([left, F.relu(self.right(left))], 1)) + x


@odd(image(3, 32, 32))
def recursion() -> nn.Module:
    """A module that contains smaller modules of its own class, two levels deep."""
    return Plain(_Tree(2))


@odd(vector(12))
class FloatFraction(nn.Module):
    """A float64 computation in the middle of a float32 model."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).double()
        x = x / x.std(dim=1, keepdim=True).add(1e-6)
        return self.two(x.to(torch.float32))


@odd(vector(20))
class Tabular(nn.Module):
    """A residual MLP on vectors with BatchNorm1d, and the average of several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(20), nn.Linear(20, 40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 20)
            )
            for _ in range(2)
        )
        self.heads = nn.ModuleList(nn.Linear(20, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = x + one(x)
        return torch.stack([head(x) for head in self.heads]).mean(0)


@odd(vector(2))
class Nerf(nn.Module):
    """The MLP of NeRF: sines and cosines of the input times powers of two, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(18, 32), nn.Linear(32 + 18, 32), nn.Linear(32, 4)

    def forward(self, p: Tensor) -> Tensor:
        parts = [p] + [f(p * 2.0**i) for i in range(4) for f in (torch.sin, torch.cos)]
        encoded = torch.cat(parts, dim=-1)
        x = F.relu(self.one(encoded))
        return self.out(F.relu(self.two(torch.cat([x, encoded], -1))))


@odd(image(3, 32, 32))
class FeaturePyramidOps(nn.Module):
    """Modules of torchvision.ops: FeaturePyramidNetwork, SqueezeExcitation, Conv2dNormActivation, StochasticDepth."""

    def __init__(self) -> None:
        super().__init__()
        ops = torchvision.ops
        self.one, self.two = ops.Conv2dNormActivation(3, 8, 3, 2), ops.Conv2dNormActivation(8, 16, 3, 2)
        self.se, self.drop = ops.SqueezeExcitation(16, 4), ops.StochasticDepth(0.5, "row")
        self.fpn, self.head = ops.FeaturePyramidNetwork([8, 16], 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.one(x)
        second = self.two(first)
        maps = self.fpn({"a": first, "b": second + self.drop(self.se(second))})
        return self.head(sum(m.mean((2, 3)) for m in maps.values()))


@odd(image(3, 32, 32))
class BranchesByName(nn.Module):
    """Modules looked up by `getattr` and `named_children`, and functions in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()
        for i in range(3):
            setattr(self, f"layer{i}", nn.Conv2d(16, 16, 3, padding=1))
        self.acts = {"relu": F.relu, "none": lambda x: x}
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for i, kind in zip(range(3), ("relu", "none", "relu"), strict=True):
            x = self.acts[kind](getattr(self, f"layer{i}")(x))
        names = [name for name, _ in self.named_children() if name.startswith("layer")]
        return self.head(x.mean((2, 3)) * len(names))
