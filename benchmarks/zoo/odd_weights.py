"""Weights that no plain Conv or Linear owns: functional calls, parametrizations, computed and shared weights.

Most models have a twin that computes the same with plain modules, whose weights are those that the model computes.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from zoo.entry import List, image, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


def conv_of(weight: Tensor, bias: Tensor | None, **options: Any) -> nn.Conv2d:
    """Returns a Conv2d with a copy of `weight` and `bias`."""
    outputs, inputs, height, width = weight.shape
    groups = options.get("groups", 1)
    conv = nn.Conv2d(inputs * groups, outputs, (height, width), bias=bias is not None, **options)
    conv.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        conv.bias = nn.Parameter(bias.detach().clone())
    return conv


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Returns a Linear with a copy of `weight`, [outputs, inputs], and `bias`."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear


class Plain(nn.Module):
    """The frame of most models here: a body, `middle` on its feature maps, and a head on their means."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(16, 10)
        self.middle = middle if middle is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.middle(self.body(x))).mean((2, 3)))


def with_middle(model: Plain, middle: nn.Module) -> Plain:
    """Returns a copy of `model` with another middle."""
    twin = Plain(middle)
    twin.body, twin.head = copy.deepcopy(model.body), copy.deepcopy(model.head)
    return twin.eval()


class _FunctionalConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16, 3, 3) * 0.1), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=1)


@odd(image(3, 32, 32))
def functional_conv() -> nn.Module:
    """`F.conv2d` with the module's own parameters."""
    return Plain(_FunctionalConv())


@odd.twin(functional_conv)
def _(model: Any) -> nn.Module:
    return with_middle(model, conv_of(model.middle.weight, model.middle.bias, padding=1))


class _SameConv(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding, computed in forward."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.size()[-2:]
        pads = []
        for size, kernel, stride in zip(
            (width, height), self.kernel_size[::-1], self.stride[::-1], strict=True
        ):
            need = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            pads += [need // 2, need - need // 2]
        x = F.pad(x, pads)
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


@odd(image(3, 32, 32))
def same_padding() -> nn.Module:
    """A Conv2d subclass that pads in forward: with stride 2, one more at the bottom and on the right."""
    return Plain(nn.Sequential(_SameConv(16, 16, 3, 2), nn.ReLU(), _SameConv(16, 16, 5, 2, groups=16)))


@odd.twin(same_padding)
def _(model: Any) -> nn.Module:
    one, _relu, two = model.middle
    return with_middle(model, nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)), conv_of(one.weight, one.bias, stride=2), nn.ReLU(),
        nn.ZeroPad2d((1, 2, 1, 2)), conv_of(two.weight, two.bias, stride=2, groups=16),
    ))  # fmt: skip


class _StandardizedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.standardized(), self.bias)

    def standardized(self) -> Tensor:
        """Returns the weight with mean 0 and variance 1 per channel."""
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        var = self.weight.var((1, 2, 3), keepdim=True, unbiased=False)
        return (self.weight - mean) / torch.sqrt(var + 1e-6)


@odd(image(3, 32, 32))
def weight_standardization() -> nn.Module:
    """Weight standardization (BiT), followed by GroupNorm."""
    return Plain(nn.Sequential(_StandardizedConv(16, 16, 3, padding=1), nn.GroupNorm(4, 16)))


@odd.twin(weight_standardization)
def _(model: Any) -> nn.Module:
    conv, norm = model.middle
    return with_middle(
        model, nn.Sequential(conv_of(conv.standardized(), conv.bias, padding=1), copy.deepcopy(norm))
    )


class _BatchNormStandardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        flat = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0
        )
        return F.conv2d(x, flat.reshape_as(self.weight), self.bias, self.stride, self.padding)


@odd(image(3, 32, 32))
def weight_standardization_by_batch_norm() -> nn.Module:
    """Weight standardization by `F.batch_norm(training=True)` of the weight, as in timm."""
    return Plain(_BatchNormStandardized(16, 16, 3, padding=1))


@odd.twin(weight_standardization_by_batch_norm)
def _(model: Any) -> nn.Module:
    conv = model.middle
    weight = F.batch_norm(conv.weight.reshape(1, 16, -1), None, None, training=True).reshape_as(conv.weight)
    return with_middle(model, conv_of(weight, conv.bias, padding=1))


@odd(image(3, 32, 32))
def weight_norm() -> nn.Module:
    """`parametrizations.weight_norm` on a convolution."""
    return Plain(parametrizations.weight_norm(nn.Conv2d(16, 16, 3, padding=1)))


@odd(image(3, 32, 32))
def old_weight_norm() -> nn.Module:
    """`nn.utils.weight_norm`: a forward pre-hook that sets the weight."""
    return Plain(nn.utils.weight_norm(nn.Conv2d(16, 16, 3, padding=1)))


@odd(image(3, 32, 32))
def spectral_norm() -> nn.Module:
    """`parametrizations.spectral_norm`: the weight divided by its largest singular value."""
    return Plain(parametrizations.spectral_norm(nn.Conv2d(16, 16, 3, padding=1)))


@odd(image(3, 32, 32))
def orthogonal() -> nn.Module:
    """`parametrizations.orthogonal` on a Linear over channels."""
    return Plain(nn.Sequential(_ChannelsLast(parametrizations.orthogonal(nn.Linear(16, 16)))))


class _ChannelsLast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.flip(-1)


@odd(image(3, 32, 32))
def own_parametrization() -> nn.Module:
    """A custom parametrization: kernels that are symmetric under a horizontal flip."""
    conv = nn.Conv2d(16, 16, 3, padding=1)
    parametrize.register_parametrization(conv, "weight", _Symmetric())
    return Plain(conv)


@odd(image(3, 32, 32))
def pruned() -> nn.Module:
    """`prune.l1_unstructured` without `prune.remove`: the weight still has a mask."""
    conv = nn.Conv2d(16, 16, 3, padding=1)
    prune.l1_unstructured(conv, "weight", amount=0.5)
    return Plain(conv)


@odd.twin(weight_norm)
@odd.twin(old_weight_norm)
@odd.twin(spectral_norm)
@odd.twin(own_parametrization)
@odd.twin(pruned)
def _(model: Any) -> nn.Module:
    return with_middle(model, conv_of(model.middle.weight, model.middle.bias, padding=1))


class _LoRA(nn.Module):
    def __init__(self, features: int = 16, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(features, features)
        self.a = nn.Parameter(torch.randn(rank, features) * 0.3)
        self.b = nn.Parameter(torch.randn(features, rank) * 0.3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (x @ self.a.t() @ self.b.t())


@odd(image(3, 32, 32))
def lora() -> nn.Module:
    """LoRA added to the output of a Linear: two small matmuls with parameters."""
    return Plain(_ChannelsLast(_LoRA()))


class _MergedLoRA(_LoRA):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.merged(), self.base.bias)

    def merged(self) -> Tensor:
        """Returns the weight plus the low-rank update."""
        return self.base.weight + 0.5 * self.b @ self.a


@odd(image(3, 32, 32))
def merged_lora() -> nn.Module:
    """LoRA that is added to the weight in forward."""
    return Plain(_ChannelsLast(_MergedLoRA()))


@odd.twin(merged_lora)
def _(model: Any) -> nn.Module:
    found = model.middle.inner
    return with_middle(model, _ChannelsLast(linear_of(found.merged(), found.base.bias)))


class _EqualizedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16, 3, 3)), nn.Parameter(torch.zeros(16))
        self.scale = 1 / math.sqrt(16 * 9)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.scale, self.bias, stride=1, padding=1)


@odd(image(3, 32, 32))
def equalized_rate() -> nn.Module:
    """Equalized learning rate (StyleGAN): the weight is multiplied by a constant in forward."""
    return Plain(_EqualizedConv())


@odd.twin(equalized_rate)
def _(model: Any) -> nn.Module:
    found = model.middle
    return with_middle(model, conv_of(found.weight * found.scale, found.bias, padding=1))


class _MaskedConv(nn.Conv2d):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", torch.ones_like(self.weight))
        self.mask: Tensor
        self.mask[:, :, 1, 1:] = 0
        self.mask[:, :, 2] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@odd(image(3, 32, 32))
def masked_conv() -> nn.Module:
    """The masked convolution of PixelCNN: `self.weight.data *= self.mask` in forward."""
    return Plain(_MaskedConv(16, 16, 3, padding=1))


@odd.twin(masked_conv)
def _(model: Any) -> nn.Module:
    return with_middle(model, conv_of(model.middle.weight * model.middle.mask, model.middle.bias, padding=1))


@odd(vector(16))
class MatmulWeight(nn.Module):
    """`x @ W + b`, `torch.addmm` and `torch.matmul` with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(16, 32) * 0.2), nn.Parameter(torch.zeros(32))
        self.w2, self.b2 = nn.Parameter(torch.randn(32, 32) * 0.2), nn.Parameter(torch.zeros(32))
        self.w3 = nn.Parameter(torch.randn(32, 8) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x @ self.w1 + self.b1)
        x = F.relu(torch.addmm(self.b2, x, self.w2))
        return torch.matmul(x, self.w3)


@odd.twin(MatmulWeight)
def _(model: Any) -> nn.Module:
    return nn.Sequential(
        linear_of(model.w1.t(), model.b1), nn.ReLU(), linear_of(model.w2.t(), model.b2), nn.ReLU(),
        linear_of(model.w3.t(), None),
    ).eval()  # fmt: skip


@odd(vector(6, 16))
class EinsumWeight(nn.Module):
    """`einsum` with parameters that have an axis for the heads (DenseGeneral in Flax)."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(16, 4, 8) * 0.2)
        self.out = nn.Parameter(torch.randn(4, 8, 16) * 0.2)
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        heads = F.gelu(torch.einsum("btc,chd->bthd", x, self.into))
        return torch.einsum("bthd,hdc->btc", heads, self.out) + self.bias


@odd.twin(EinsumWeight)
def _(model: Any) -> nn.Module:
    into, out = model.into.reshape(16, 32).t(), model.out.reshape(32, 16).t()
    return nn.Sequential(linear_of(into, None), nn.GELU(), linear_of(out, model.bias)).eval()
