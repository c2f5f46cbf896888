"""Values selected and replaced by computed masks, tensors as bounds, diagonals, and one kernel per image."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


@odd(image(3, 32, 32))
class MaskedValues(nn.Module):
    """`x[mask] *= 0.5`, `x[mask] = y[mask]` and `x[mask] = token`, with masks computed from the values."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other, self.head = body(), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 4)
        self.token = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        y = self.other(x)
        large = y > 0.5
        y[large] *= 0.5
        y[y < -1.0] = -1.0
        below = y < x
        x = x.clone()
        x[below] = y[below] - 0.1 * x[below].abs()
        tokens = x.flatten(2).transpose(1, 2).contiguous()
        tokens[tokens.mean(-1) > 0.6] = self.token
        return self.head(tokens.amax(1))


@odd(vector(12))
class TensorBounds(nn.Module):
    """`clamp` with bounds that are parameters, tensors or other activations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(16, 4)
        self.low, self.high = nn.Parameter(-torch.ones(16)), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), self.two(x)
        a = torch.clamp(a, self.low, self.high)
        b = b.clamp(min=a - 0.5).clamp_max(torch.tensor(2.0))
        b = torch.clip(b, max=a + 1.0)
        a.clamp_(min=self.low * 0.5)
        return self.head(a * b)


@odd(vector(6, 8))
class Diagonals(nn.Module):
    """`fill_diagonal_` on a mask of similarities, a diagonal that is written to, `diag_embed` and `tril`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.embed(x), dim=-1)
        s = z @ z.transpose(1, 2)
        prior = torch.ones(6, 6).fill_diagonal_(0.0)
        s = s * prior
        torch.diagonal(s, dim1=-2, dim2=-1).copy_(z.mean(-1))
        s = s + torch.diag_embed(z[..., 0]).tril()
        return self.head(s.softmax(-1) @ z).mean(1)


class _Modulated(nn.Module):
    """Modulated convolution (StyleGAN2): a kernel per image, scaled by its style; one grouped convolution for all."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, *, demodulate: bool = True) -> None:
        super().__init__()
        self.outputs, self.kernel, self.demodulate = outputs, kernel, demodulate
        self.weight = nn.Parameter(torch.randn(1, outputs, inputs, kernel, kernel))
        self.scale, self.modulation = (inputs * kernel**2) ** -0.5, nn.Linear(12, inputs)
        nn.init.ones_(self.modulation.bias)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        style = self.modulation(style).view(batch, 1, channels, 1, 1)
        weight = self.scale * self.weight * style
        if self.demodulate:
            demod = torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8)
            weight = weight * demod.view(batch, self.outputs, 1, 1, 1)
        weight = weight.view(batch * self.outputs, channels, self.kernel, self.kernel)
        x = x.reshape(1, batch * channels, height, width)
        out = F.conv2d(x, weight, padding=self.kernel // 2, groups=batch)
        return out.view(batch, self.outputs, *out.shape[2:])


@odd(vector(12))
class StyleGenerator(nn.Module):
    """The synthesis of StyleGAN2: a repeated learned constant, modulated convolutions, a noise buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(
            nn.Linear(12, 12), nn.LeakyReLU(0.2), nn.Linear(12, 12), nn.LeakyReLU(0.2)
        )
        self.constant = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.convs = nn.ModuleList([_Modulated(8, 8), _Modulated(8, 8)])
        self.to_rgb = _Modulated(8, 3, 1, demodulate=False)
        self.register_buffer("noise", torch.randn(1, 1, 8, 8))
        self.noise: Tensor
        self.strength, self.bias = nn.Parameter(torch.ones(1) * 0.1), nn.Parameter(torch.zeros(1, 8, 1, 1))

    def forward(self, z: Tensor) -> Tensor:
        w = self.mapping(z * torch.rsqrt(torch.mean(z**2, dim=1, keepdim=True) + 1e-8))
        x = self.constant.repeat(w.shape[0], 1, 1, 1)
        x = F.leaky_relu(self.convs[0](x, w), 0.2) * 2**0.5
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = F.leaky_relu(self.convs[1](x, w) + self.strength * self.noise + self.bias, 0.2)
        return torch.tanh(self.to_rgb(x, w))


@odd((image(3, 32, 32), image(3, 16, 16)))
class SiameseTracker(nn.Module):
    """SiamFC and SiamRPN++: cross-correlation with the features of the template as the kernel, full and depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.adjust = body(), nn.Conv2d(16, 4, 1)

    def forward(self, search: Tensor, template: Tensor) -> tuple[Tensor, Tensor]:
        x, z = self.body(search), self.body(template)
        batch, channels, height, width = x.size()
        wide = x.reshape(1, batch * channels, height, width)
        score = F.conv2d(wide, z, groups=batch)
        score = score.permute(1, 0, 2, 3)
        kernel = z.view(batch * channels, 1, z.size(2), z.size(3))
        each = F.conv2d(wide, kernel, groups=batch * channels)
        return score * 0.05, self.adjust(each.view(batch, channels, each.size(2), each.size(3)))


@odd((vector(10), vector(6)))
class FunctionalBilinear(nn.Module):
    """`F.bilinear`, and `einsum` of three operands with a parameter in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 10, 6) * 0.2), nn.Parameter(torch.zeros(5))
        self.core, self.head = nn.Parameter(torch.randn(10, 6, 7) * 0.2), nn.Linear(12, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one = F.bilinear(left, right, self.weight, self.bias)
        two = torch.einsum("bi,ijk,bj->bk", left, self.core, right)
        return self.head(torch.cat([one, two], 1))


@odd(image(3, 32, 32))
class Unpooled(nn.Module):
    """DeconvNet: `F.max_unpool2d` with the indices of `F.max_pool2d`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.one(x))
        size = x.size()
        x, places = F.max_pool2d(x, 2, 2, return_indices=True)
        x = F.relu(self.two(x))
        return self.last(F.max_unpool2d(x, places, [2, 2], [2, 2], output_size=size))
