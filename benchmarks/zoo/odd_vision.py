"""Whole vision networks as users write them: U-Nets, generators, super-resolution, video, siamese networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Returns Conv, BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


@odd(image(3, 37, 45))
class UnetOdd(nn.Module):
    """A U-Net with odd sizes: upsampled maps are padded to the sizes of the skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(3, 8), block(8, 16), block(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.join = nn.ModuleList([block(32, 16), block(16, 8)])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = up(x)
            dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            x = join(torch.cat([skip, x], dim=1))
        return self.out(x)


@odd(image(1, 60, 60))
class UnetCrop(nn.Module):
    """The original U-Net: convolutions without padding, and skips cropped to the smaller maps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.up, self.join, self.out = (
            nn.ConvTranspose2d(16, 8, 2, 2),
            nn.Conv2d(16, 8, 3),
            nn.Conv2d(8, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.one(x))
        up = self.up(F.relu(self.two(F.max_pool2d(first, 2))))
        off = (first.shape[-1] - up.shape[-1]) // 2
        size = up.shape[-1]
        return self.out(F.relu(self.join(torch.cat([first[..., off : off + size, off : off + size], up], 1))))


@odd(vector(32))
class Dcgan(nn.Module):
    """The generator of DCGAN: transposed convolutions from a vector to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(32, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z[:, :, None, None])


@odd(image(3, 32, 32))
class Discriminator(nn.Module):
    """A patch discriminator: LeakyReLU, InstanceNorm, and spectral_norm on every convolution."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.main = nn.Sequential(
            norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2, True), norm(nn.Conv2d(16, 32, 4, 2, 1)),
            nn.InstanceNorm2d(32), nn.LeakyReLU(0.2, True), norm(nn.Conv2d(32, 1, 4, 1, 1)),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


@odd(image(3, 16, 16))
class PixelShuffleNet(nn.Module):
    """Super-resolution (EDSR): residual blocks, a pixel shuffle, and the upsampled input added."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.PReLU(16), nn.Conv2d(16, 16, 3, padding=1))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = self.head(x)
        for one in self.blocks:
            features = features + 0.1 * one(features)
        up = F.pixel_shuffle(self.tail(features), 2)
        return up + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)


@odd(image(3, 32, 32))
class StyleTransfer(nn.Module):
    """Style transfer: reflection padding, InstanceNorm with weights, nearest upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ReflectionPad2d(4), nn.Conv2d(3, 8, 9), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
            nn.ReflectionPad2d(1), nn.Conv2d(8, 16, 3, 2), nn.InstanceNorm2d(16, affine=True), nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="nearest"), nn.ReflectionPad2d(1), nn.Conv2d(16, 3, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


@odd(vector(784))
class Vae(nn.Module):
    """A variational autoencoder: noise in training, the mean in evaluation, and a tuple as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mean, self.log_var = nn.Linear(784, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.fc3, self.fc4 = nn.Linear(8, 64), nn.Linear(64, 784)

    def sample(self, mean: Tensor, log_var: Tensor) -> Tensor:
        """Returns a sample by reparametrization in training, and the mean in evaluation."""
        if not self.training:
            return mean
        return mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x.view(-1, 784)))
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        z = self.sample(mean, log_var)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, log_var


@odd(image(3, 32, 32))
class ConvAutoencoder(nn.Module):
    """An autoencoder with `output_padding` and grouped transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ELU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ELU())
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 3, 2, 1, output_padding=1, groups=4), nn.ELU(),
            nn.ConvTranspose2d(8, 3, 3, 2, 1, output_padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


@odd(image(3, 32, 32))
class SegNet(nn.Module):
    """SegNet: a pool that returns indices, and unpooling with them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.pool, self.unpool = (
            block(3, 16),
            nn.MaxPool2d(2, return_indices=True),
            nn.MaxUnpool2d(2),
        )
        self.middle, self.out = block(16, 16), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, places = self.pool(self.down(x))
        return self.out(self.unpool(self.middle(x), places))


@odd(image(6, 32, 32))
class Siamese(nn.Module):
    """One tower applied to both halves of the channels, and the distance between their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = body(), nn.Linear(16, 8)

    def embed(self, x: Tensor) -> Tensor:
        """Returns vectors of length 1."""
        return F.normalize(self.head(self.tower(x).mean((2, 3))), dim=-1)

    def forward(self, pair: Tensor) -> Tensor:
        first, second = torch.split(pair, 3, dim=1)
        return (self.embed(first) - self.embed(second)).pow(2).sum(1, keepdim=True).sqrt()


@odd(image(3, 4, 32, 32))
class VideoShift(nn.Module):
    """Frames folded into the batch and back, with a temporal shift between (TSM)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = body(), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, frames, height, width = x.shape
        x = self.body(x.transpose(1, 2).reshape(batch * frames, channels, height, width))
        x = x.view(batch, frames, *x.shape[1:])
        shifted = torch.cat([x[:, 1:, :4], torch.zeros_like(x[:, :1, :4])], dim=1)
        x = torch.cat([shifted, x[:, :, 4:]], dim=2).flatten(0, 1)
        x = F.relu(self.conv(x)).mean((2, 3)).view(batch, frames, -1)
        return self.head(x.mean(1))


@odd(image(1, 8, 16, 16))
class Conv3dNet(nn.Module):
    """3-D convolutions, also transposed, and a 3-D pool over a volume."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2)
        )
        self.up, self.out = nn.ConvTranspose3d(8, 8, 2, 2), nn.Conv3d(9, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([x, F.relu(self.up(self.down(x)))], 1))


@odd(image(3, 32, 32), opset=16)
class SpatialTransformer(nn.Module):
    """A spatial transformer: `affine_grid` and `grid_sample`."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(body(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 6))
        self.body, self.head = body(), nn.Linear(16, 10)
        self.register_buffer("identity", torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.identity: Tensor

    def forward(self, x: Tensor) -> Tensor:
        theta = (self.identity + 0.1 * torch.tanh(self.locate(x))).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return self.head(self.body(x).mean((2, 3)))


@odd(image(3, 32, 32))
class DenoiserDnCnn(nn.Module):
    """DnCNN: the predicted noise is subtracted; convolutions without bias before BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(3):
            layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
        self.net = nn.Sequential(*layers, nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.net(x)
