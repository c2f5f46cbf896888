"""YOLOX: an anchor-free detector with separate heads for classes and boxes, and the original parameter names.

Source: Ge et al., "YOLOX: Exceeding YOLO Series in 2021", 2021. Modules and parameters have the names of Megvii's code
(Apache-2.0), so that its checkpoints load (`model.checkpoint=yolox_nano.pth`, with activation silu and 80 classes; the
input is BGR pixels in 0..255, letterboxed to the top left). Quantization absorbs a ReLU into the range of its input, so
it costs no time, unlike a SiLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from qatkit.models.detectors.detector import Detector, grid
from qatkit.models.detectors.yolox_loss import YoloxLoss
from qatkit_verify.errors import ConfigError

_ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU, "relu6": nn.ReLU6, "hardswish": nn.Hardswish}
_STRIDES, _CHANNELS = (8, 16, 32), (256, 512, 1024)
_PRIOR = 0.01  # initial score of every cell
_LARGEST_LOG = 10.0  # maximum logarithm of a side in strides; no picture reaches it
Conv = Callable[..., nn.Module]


def yolox_nano(num_classes: int = 80, activation: str = "silu") -> Yolox:
    """Returns YOLOX-Nano: 0.9 M parameters, depthwise convolutions."""
    return Yolox(num_classes, 0.33, 0.25, activation, depthwise=True)


def yolox_tiny(num_classes: int = 80, activation: str = "silu") -> Yolox:
    """Returns YOLOX-Tiny: 5.1 M parameters."""
    return Yolox(num_classes, 0.33, 0.375, activation)


class Yolox(Detector):
    """YOLOX of any depth and width.

    Args:
        num_classes: number of object classes.
        depth: number of blocks, as a share of YOLOX-L's.
        width: number of channels, as a share of YOLOX-L's.
        activation: silu | relu | relu6 | hardswish.
        depthwise: whether 3x3 convolutions are depthwise, each followed by a 1x1 convolution.

    Raises:
        ConfigError: the activation is unknown.
    """

    def __init__(
        self,
        num_classes: int,
        depth: float,
        width: float,
        activation: str = "silu",
        *,
        depthwise: bool = False,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ConfigError("model.kwargs.activation", activation, f"one of {', '.join(_ACTIVATIONS)}")
        act = _ACTIVATIONS[activation]
        self.backbone = _Pyramid(depth, width, act, depthwise)
        self.head = _Head(num_classes, width, act, depthwise)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps, module.momentum = 1e-3, 0.03
        self._known: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # (corners, strides) of the cells, by the number of cells

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Returns boxes and scores, followed by the inputs of the loss: logits, objectness and offsets.

        Raises:
            ConfigError: a side of the images is not a multiple of 32 pixels.
        """
        if images.shape[2] % _STRIDES[-1] or images.shape[3] % _STRIDES[-1]:
            told = [int(images.shape[2]), int(images.shape[3])]
            raise ConfigError("data.image_size", told, f"a multiple of {_STRIDES[-1]} on each side for YOLOX")
        levels = self.head(self.backbone(images))
        sizes = [(int(one[0].shape[2]), int(one[0].shape[3])) for one in levels]
        logits, objectness, offsets = (
            torch.cat([level[part].flatten(2).transpose(1, 2) for level in levels], 1) for part in range(3)
        )
        cells, strides = self.cells(sizes)
        boxes = decoded(offsets, cells.to(images.device), strides.to(images.device))
        scores = logits.sigmoid() * objectness.sigmoid()
        return {
            "boxes": boxes,
            "scores": scores,
            "logits": logits,
            "objectness": objectness,
            "offsets": offsets,
        }

    def cells(self, sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Returns the top left corners of all cells in pixels, [boxes, 2], and their strides, [boxes, 1]."""
        pairs = list(zip(sizes, _STRIDES, strict=True))
        cells = torch.cat([grid(*size, stride) for size, stride in pairs])
        strides = torch.cat([torch.full((size[0] * size[1], 1), float(stride)) for size, stride in pairs])
        self._known[len(cells)] = (cells, strides)
        return cells, strides

    @property
    def criterion(self) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
        return self._loss

    def _loss(self, outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
        logits, objectness, offsets = outputs
        cells, strides = (one.to(logits.device) for one in self._known[logits.shape[1]])
        return YoloxLoss(cells, strides)(logits, objectness, decoded(offsets, cells, strides), targets)


def decoded(offsets: Tensor, cells: Tensor, strides: Tensor) -> Tensor:
    """Returns corners [N, boxes, 4] from centres relative to cells and logarithms of sides, both in strides."""
    centers = offsets[..., :2] * strides + cells
    half = offsets[..., 2:].clamp(max=_LARGEST_LOG).exp() * (0.5 * strides)
    return torch.cat([centers - half, centers + half], 2)


class _BaseConv(nn.Module):
    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, act: type[nn.Module], groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.act(self.bn(self.conv(x)))
        return found


class _DepthwiseConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.dconv = _BaseConv(inputs, inputs, kernel, stride, act, groups=inputs)
        self.pconv = _BaseConv(inputs, outputs, 1, 1, act)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.pconv(self.dconv(x))
        return found


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, shortcut: bool, act: type[nn.Module], conv: Conv) -> None:
        super().__init__()
        self.conv1, self.conv2 = _BaseConv(channels, channels, 1, 1, act), conv(channels, channels, 3, 1, act)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv2(self.conv1(x))
        return found + x if self.shortcut else found


class _CSPLayer(nn.Module):
    """A block in which half of the channels take a shortcut."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        count: int,
        act: type[nn.Module],
        conv: Conv,
        *,
        shortcut: bool = True,
    ) -> None:
        super().__init__()
        hidden = outputs // 2
        self.conv1, self.conv2 = _BaseConv(inputs, hidden, 1, 1, act), _BaseConv(inputs, hidden, 1, 1, act)
        self.conv3 = _BaseConv(2 * hidden, outputs, 1, 1, act)
        self.m = nn.Sequential(*(_Bottleneck(hidden, shortcut, act, conv) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.conv1(x), self.conv2(x)
        found: Tensor = self.conv3(torch.cat([self.m(first), second], 1))
        return found


class _Focus(nn.Module):
    """A convolution over blocks of 2 x 2 pixels, which become channels."""

    def __init__(self, inputs: int, outputs: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.conv = _BaseConv(4 * inputs, outputs, 3, 1, act)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        found: Tensor = self.conv(torch.cat(parts, 1))
        return found


class _Pooled(nn.Module):
    """A block with parallel max pools of several sizes."""

    def __init__(self, channels: int, act: type[nn.Module]) -> None:
        super().__init__()
        hidden = channels // 2
        self.conv1 = _BaseConv(channels, hidden, 1, 1, act)
        self.m = nn.ModuleList(nn.MaxPool2d(size, 1, size // 2) for size in (5, 9, 13))
        self.conv2 = _BaseConv(4 * hidden, channels, 1, 1, act)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        found: Tensor = self.conv2(torch.cat([x, *(pool(x) for pool in self.m)], 1))
        return found


class _Darknet(nn.Module):
    def __init__(self, depth: float, width: float, act: type[nn.Module], conv: Conv) -> None:
        super().__init__()
        base, count = int(64 * width), max(round(3 * depth), 1)
        self.stem = _Focus(3, base, act)
        self.dark2 = self._stage(base, count, act, conv)
        self.dark3 = self._stage(2 * base, 3 * count, act, conv)
        self.dark4 = self._stage(4 * base, 3 * count, act, conv)
        last = _CSPLayer(16 * base, 16 * base, count, act, conv, shortcut=False)
        self.dark5 = nn.Sequential(conv(8 * base, 16 * base, 3, 2, act), _Pooled(16 * base, act), last)

    def _stage(self, inputs: int, count: int, act: type[nn.Module], conv: Conv) -> nn.Sequential:
        block = _CSPLayer(2 * inputs, 2 * inputs, count, act, conv)
        return nn.Sequential(conv(inputs, 2 * inputs, 3, 2, act), block)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        third = self.dark3(self.dark2(self.stem(x)))
        fourth = self.dark4(third)
        return third, fourth, self.dark5(fourth)


class _Pyramid(nn.Module):
    def __init__(self, depth: float, width: float, act: type[nn.Module], depthwise: bool) -> None:
        super().__init__()
        conv: Conv = _DepthwiseConv if depthwise else _BaseConv
        low, middle, high = (int(channels * width) for channels in _CHANNELS)
        count = round(3 * depth)
        self.backbone = _Darknet(depth, width, act, conv)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.lateral_conv0 = _BaseConv(high, middle, 1, 1, act)
        self.C3_p4 = _CSPLayer(2 * middle, middle, count, act, conv, shortcut=False)
        self.reduce_conv1 = _BaseConv(middle, low, 1, 1, act)
        self.C3_p3 = _CSPLayer(2 * low, low, count, act, conv, shortcut=False)
        self.bu_conv2 = conv(low, low, 3, 2, act)
        self.C3_n3 = _CSPLayer(2 * low, middle, count, act, conv, shortcut=False)
        self.bu_conv1 = conv(middle, middle, 3, 2, act)
        self.C3_n4 = _CSPLayer(2 * middle, high, count, act, conv, shortcut=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        third, fourth, fifth = self.backbone(x)
        top = self.lateral_conv0(fifth)
        middle = self.reduce_conv1(self.C3_p4(torch.cat([self.upsample(top), fourth], 1)))
        low = self.C3_p3(torch.cat([self.upsample(middle), third], 1))
        middle = self.C3_n3(torch.cat([self.bu_conv2(low), middle], 1))
        return low, middle, self.C3_n4(torch.cat([self.bu_conv1(middle), top], 1))


class _Head(nn.Module):
    def __init__(self, classes: int, width: float, act: type[nn.Module], depthwise: bool) -> None:
        super().__init__()
        conv: Conv = _DepthwiseConv if depthwise else _BaseConv
        channels = int(256 * width)

        def tower() -> nn.Sequential:
            return nn.Sequential(*(conv(channels, channels, 3, 1, act) for _ in range(2)))

        self.stems = nn.ModuleList(_BaseConv(int(one * width), channels, 1, 1, act) for one in _CHANNELS)
        self.cls_convs = nn.ModuleList(tower() for _ in _CHANNELS)
        self.reg_convs = nn.ModuleList(tower() for _ in _CHANNELS)
        self.cls_preds = nn.ModuleList(nn.Conv2d(channels, classes, 1) for _ in _CHANNELS)
        self.reg_preds = nn.ModuleList(nn.Conv2d(channels, 4, 1) for _ in _CHANNELS)
        self.obj_preds = nn.ModuleList(nn.Conv2d(channels, 1, 1) for _ in _CHANNELS)
        for one in (*self.cls_preds, *self.obj_preds):
            nn.init.constant_(one.bias, -math.log((1 - _PRIOR) / _PRIOR))

    def forward(self, levels: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for level, features in enumerate(levels):
            x = self.stems[level](features)
            classes = self.cls_preds[level](self.cls_convs[level](x))
            x = self.reg_convs[level](x)
            offsets = self.reg_preds[level](x)
            found.append((classes, self.obj_preds[level](x), offsets))
        return found
