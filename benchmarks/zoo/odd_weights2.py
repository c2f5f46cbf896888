"""More computed weights: shared, tied, merged in forward, made from other weights, or dependent on the input."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, tokens, vector
from zoo.odd_branches import body
from zoo.odd_weights import Plain, conv_of, linear_of, with_middle

odd = List("odd")
ENTRIES = odd.entries


@odd(image(3, 32, 32))
class SplitBiases(nn.Module):
    """A qkv weight with biases only for q and v, concatenated in forward (BEiT, EVA)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, 8)
        self.qkv = nn.Linear(32, 96, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(32) * 0.1), nn.Parameter(torch.randn(32) * 0.1)
        self.out, self.head = nn.Linear(32, 32), nn.Linear(32, 10)

    def joined(self) -> Tensor:
        """Returns the bias of q, k and v."""
        return torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        qkv = F.linear(input=x, weight=self.qkv.weight, bias=self.joined())
        return self.attend(x, qkv)

    def attend(self, x: Tensor, qkv: Tensor) -> Tensor:
        """Returns the logits after attention with four heads."""
        batch, length, _ = x.shape
        q, k, v = qkv.reshape(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, 32))
        return self.head(x.mean(1))


@odd.twin(SplitBiases)
def _(model: Any) -> nn.Module:
    class Twin(SplitBiases):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x).flatten(2).transpose(1, 2)
            return self.attend(x, self.qkv(x))

    twin = Twin()
    twin.load_state_dict(model.state_dict())
    twin.qkv = linear_of(model.qkv.weight, model.joined())
    return twin.eval()


class _CastLinear(nn.Linear):
    """A Linear with its own forward, like timm's classifier (it casts under torch.jit)."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            bias = self.bias.to(dtype=x.dtype) if self.bias is not None else None
            return F.linear(x, self.weight.to(dtype=x.dtype), bias=bias)
        return F.linear(x, self.weight, self.bias)


@odd(image(3, 32, 32))
def linear_subclass() -> nn.Module:
    """A Linear subclass whose forward calls `F.linear`."""
    model = Plain(nn.Conv2d(16, 16, 1))
    model.head = _CastLinear(16, 10)
    return model


@odd.twin(linear_subclass)
def _(model: Any) -> nn.Module:
    twin = with_middle(model, copy.deepcopy(model.middle))
    twin.head = linear_of(model.head.weight, model.head.bias)
    return twin


@odd(tokens(50, 8))
class TiedDecoder(nn.Module):
    """An output layer that uses the weight of the embedding: `F.linear(x, self.embed.weight)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.inner, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + F.gelu(self.inner(x)))
        return F.linear(x, self.embed.weight)


@odd(vector(24))
class TiedAutoencoder(nn.Module):
    """An autoencoder whose decoder uses the transposed weight of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(24, 8), nn.Parameter(torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(self.encoder(x)), self.encoder.weight.t(), self.bias)


@odd(image(3, 32, 32))
def shared_module() -> nn.Module:
    """One block applied three times (recursion with shared weights)."""
    block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    return Plain(nn.Sequential(block, block, block))


class _RepBlock(nn.Module):
    """3x3, 1x1 and identity branches (the training form of RepVGG), merged in forward."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.three, self.one = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)

    def merged(self) -> tuple[Tensor, Tensor]:
        """Returns the weight and bias of all three branches together."""
        identity = torch.eye(16)[:, :, None, None]
        assert self.three.bias is not None and self.one.bias is not None
        weight = self.three.weight + F.pad(self.one.weight + identity, (1, 1, 1, 1))
        return weight, self.three.bias + self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.merged()
        return F.conv2d(x, weight, bias, padding=1)


@odd(image(3, 32, 32))
def merged_branches() -> nn.Module:
    """Branches merged into one kernel in forward (online re-parametrization)."""
    return Plain(_RepBlock())


@odd.twin(merged_branches)
def _(model: Any) -> nn.Module:
    return with_middle(model, conv_of(*model.middle.merged(), padding=1))


class _ScaledWeight(nn.Module):
    """A convolution with a per-channel gain on its weight, as in NFNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gain = nn.Conv2d(16, 16, 3, padding=1), nn.Parameter(torch.rand(16, 1, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight * self.gain, self.conv.bias, 1, 1)


@odd(image(3, 32, 32))
def gained_weight() -> nn.Module:
    """A weight that is multiplied by a learned per-channel gain."""
    return Plain(_ScaledWeight())


@odd.twin(gained_weight)
def _(model: Any) -> nn.Module:
    found = model.middle
    return with_middle(model, conv_of(found.conv.weight * found.gain, found.conv.bias, padding=1))


class _Sobel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kernel = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])
        self.register_buffer("kernel", torch.stack([kernel, kernel.t()])[:, None].repeat(16, 1, 1, 1))
        self.kernel: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, padding=1, groups=16)


@odd(image(3, 32, 32))
def fixed_filter() -> nn.Module:
    """A depthwise convolution with a buffer as its kernel (Sobel, blur pools)."""
    return Plain(nn.Sequential(_Sobel(), nn.Conv2d(32, 16, 1)))


@odd.twin(fixed_filter)
def _(model: Any) -> nn.Module:
    sobel, conv = model.middle
    return with_middle(
        model, nn.Sequential(conv_of(sobel.kernel, None, padding=1, groups=16), copy.deepcopy(conv))
    )


class _BlurPool(nn.Module):
    """Reflection padding and a convolution with a fixed kernel and stride 2."""

    def __init__(self) -> None:
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("kernel", row[:, None] * row[None])
        self.kernel: Tensor

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel[None, None].expand(x.shape[1], 1, 3, 3)
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), kernel, stride=2, groups=x.shape[1])


@odd(image(3, 32, 32))
def blur_pool() -> nn.Module:
    """Anti-aliased pooling: a fixed kernel, expanded to the channels of the input."""
    return Plain(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), _BlurPool()))


@odd.twin(blur_pool)
def _(model: Any) -> nn.Module:
    conv, relu, blur = model.middle
    kernel = blur.kernel[None, None].repeat(16, 1, 1, 1)
    return with_middle(model, nn.Sequential(
        copy.deepcopy(conv), relu, nn.ReflectionPad2d(1), conv_of(kernel, None, stride=2, groups=16)
    ))  # fmt: skip


@odd(image(3, 32, 32))
class CosineHead(nn.Module):
    """A head with normalized features, a normalized weight and a temperature (ArcFace, CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = body(), nn.Parameter(torch.randn(10, 16))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        features = F.normalize(self.body(x).mean((2, 3)), dim=1)
        return self.temperature.exp() * F.linear(features, F.normalize(self.weight))


class _DynamicConv(nn.Module):
    """A convolution that mixes four kernels in a way that depends on the sample (CondConv)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.route = nn.Parameter(torch.randn(4, 16 * 16 * 9) * 0.1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        share = self.route(x.mean((2, 3))).softmax(1)
        kernels = (share @ self.kernels).view(batch * 16, channels, 3, 3)
        out = F.conv2d(x.reshape(1, batch * channels, height, width), kernels, padding=1, groups=batch)
        return out.view(batch, 16, height, width)


@odd(image(3, 32, 32))
def dynamic_conv() -> nn.Module:
    """CondConv: a convolution with computed weights and the batch folded into its groups."""
    return Plain(_DynamicConv())


class _Binary(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.abs().mean((1, 2, 3), keepdim=True)
        weight = (self.weight.sign() * size - self.weight).detach() + self.weight
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


@odd(image(3, 32, 32))
def straight_through() -> nn.Module:
    """A binary weight with a straight-through gradient (`detach`)."""
    return Plain(_Binary(16, 16, 3, padding=1))


@odd.twin(straight_through)
def _(model: Any) -> nn.Module:
    conv = model.middle
    weight = conv.weight.sign() * conv.weight.abs().mean((1, 2, 3), keepdim=True)
    return with_middle(model, conv_of(weight, conv.bias, padding=1))


@odd(vector(16))
class HyperNetwork(nn.Module):
    """A weight that a Linear computes from a learned code: constant at inference."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(8)), nn.Linear(8, 16 * 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make(self.code).view(12, 16) * 0.3
        return self.head(F.relu(F.linear(x, weight)))


@odd(vector(16))
class Bilinear(nn.Module):
    """`nn.Bilinear`, and `torch.bmm` with a parameter expanded to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cross = nn.Linear(16, 8), nn.Bilinear(8, 8, 6)
        self.mix = nn.Parameter(torch.randn(6, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.inner(x))
        both = self.cross(x, x)
        return torch.bmm(both[:, None], self.mix.expand(x.shape[0], -1, -1))[:, 0]


@odd(vector(10, 16))
class SpectralConv1d(nn.Module):
    """`F.conv1d` and `F.conv_transpose1d` with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Parameter(torch.randn(20, 10, 4) * 0.2),
            nn.Parameter(torch.randn(20, 10, 4) * 0.2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(
            F.relu(F.conv1d(x, self.down, stride=2, padding=1)), self.up, stride=2, padding=1
        )
