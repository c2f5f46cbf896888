"""U-Net for segmentation: logits with the input's height and width, which may be odd.

    encoder   two 3x3 convolutions per level, each with BatchNorm and ReLU; a 2x2 max pool, twice the channels
    decoder   nearest upsampling to the skip's size, a 3x3 convolution, concatenation, two 3x3 convolutions
    head      a 1x1 convolution

Values are repeated to the size of the encoder's features, so odd sizes need neither padding nor cropping. ONNX
Runtime repeats int8 values, so only the input and the output are float in an INT8 file. A transposed convolution has
no int8 kernel there, and bilinear upsampling is float.

Source: Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation", 2015; BatchNorm, padded
convolutions and nearest upsampling are later conventions.
"""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn import functional as F

from qatkit.config.fields import COUNT
from qatkit_verify.errors import ConfigError


class UNet(nn.Module):
    """A U-Net: images [N, channels, H, W] to logits [N, num_classes, H, W], H and W at least 2 ** (levels - 1).

    Args:
        num_classes: number of channels of the logits.
        width: number of channels of the first level; each level has twice as many as the level before.
        levels: number of resolutions.
        channels: number of channels of the images.

    Raises:
        ConfigError: a count is not positive, or (in `forward`) an image is too small.
    """

    def __init__(self, num_classes: int, width: int = 32, levels: int = 5, channels: int = 3) -> None:
        super().__init__()
        for key, value in (("width", width), ("levels", levels), ("channels", channels)):
            COUNT.check(f"model.kwargs.{key}", value)
        widths = [width * 2**level for level in range(levels)]
        self.encoder = nn.ModuleList(map(_block, [channels, *widths[:-1]], widths))
        self.pool = nn.MaxPool2d(2)
        self.decoder = nn.ModuleList(map(_Up, widths[:0:-1], widths[-2::-1]))
        self.head = nn.Conv2d(width, num_classes, 1)
        self._least = 2 ** (levels - 1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if min(height, width) < self._least:
            allowed = f"at least {self._least} x {self._least} pixels for the levels of this U-Net"
            raise ConfigError("data.image_size", f"[{height}, {width}]", allowed)
        skips = []
        for level, block in enumerate(self.encoder):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        for up, skip in zip(self.decoder, skips[-2::-1], strict=True):
            x = up(x, skip)
        logits: Tensor = self.head(x)
        return logits


class _Up(nn.Module):
    """A decoder block that enlarges the features of the level below and joins them with the encoder's features."""

    def __init__(self, below: int, width: int) -> None:
        super().__init__()
        self.narrow = nn.Sequential(*_layer(below, width))
        self.block = _block(2 * width, width)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        larger = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
        joined: Tensor = self.block(cat([skip, self.narrow(larger)], 1))
        return joined


def _block(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(*_layer(inputs, width), *_layer(width, width))


def _layer(inputs: int, width: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
