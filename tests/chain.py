"""The steps from a float model to an ONNX file that many tests share, and small models to run through them.

The steps prepare, calibrate, convert and export a model whose BatchNorm statistics are realistic. The
expected quantization of the small models was derived by hand.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import onnxruntime as ort
import torch
import torchvision
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torchvision.models.video.mvit import MSBlockConfig, MViT

from qatkit.calibration import calibrate
from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.pass_result import PassResult
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM, Backend
from qatkit.quant.pairs import least_scale

Overrides = Mapping[str, OverrideConfig]


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Returns standard normal values that depend only on `seed`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def settle(model: nn.Module, *shape: int, seed: int = 0) -> nn.Module:
    """Gives every BatchNorm random affine parameters and realistic statistics; returns the model in eval mode."""
    torch.manual_seed(seed)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.2)
        norm.momentum = None  # a plain average over the batches below
    model.train()
    with torch.no_grad():
        for i in range(2):
            model(noise(8, *shape, seed=100 + i))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


def build(name: str, size: int, **kwargs: object) -> nn.Module:
    """Returns a torchvision classifier of 10 classes with random weights, after `settle`."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=10, **kwargs)
    return settle(cast(nn.Module, model), 3, size, size)


def small_vit() -> nn.Module:
    """Returns torchvision's VisionTransformer for 32 x 32 pixels, with two encoder layers and a random head."""
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10
    )
    nn.init.normal_(model.heads.head.weight, std=0.2)
    return cast(nn.Module, model.eval())


def small_mvit(version: int) -> nn.Module:
    """Returns an MViT of two blocks for clips of 4 frames of 32 pixels; the second halves the resolution."""
    second = version == 2
    first = ([3, 3, 3], [1, 1, 1]) if second else ([], [])  # kernel and stride that pool the queries
    blocks = [
        MSBlockConfig(1, 32, 32, first[0], [3, 3, 3], first[1], [1, 4, 4]),
        MSBlockConfig(2, 32, 64, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
    ]
    if not second:
        blocks[0].output_channels, blocks[1].input_channels = 64, 64
    model = MViT(
        (32, 32), 4, blocks, second, not second, rel_pos_embed=second, proj_after_attn=second, num_classes=10
    )
    return cast(nn.Module, model)


def reach(integers: Tensor) -> Tensor:
    """Returns [out]: the largest magnitude among a channel's integers and their pair sums.

    A kernel without VNNI adds the pairs. The result is at most 128 for weights guarded against saturation.
    """
    pairs = least_scale(integers.float(), per_channel=True) * 127.99
    return torch.maximum(integers.flatten(1).float().abs().amax(1), pairs.round())


def prepared(
    model: nn.Module,
    example: Tensor,
    backend: Backend = FBGEMM,
    overrides: Overrides | None = None,
    batch_norm: str = "fold",
) -> fx.GraphModule:
    """Returns the graph after fuse, stub and prepare_qat, before calibration."""
    graph = stub(fuse(model, example, batch_norm, depthwise=True).graph, example).graph
    return prepare_qat(graph, backend, example, overrides).graph


def calibrated(
    model: nn.Module,
    images: Tensor,
    backend: Backend = FBGEMM,
    overrides: Overrides | None = None,
    batch_norm: str = "fold",
) -> fx.GraphModule:
    """Returns the prepared graph, calibrated with `images` and in inference mode."""
    graph = prepared(model, images[:2], backend, overrides, batch_norm).eval()
    calibrate(graph, [images])
    return graph


class Shipped(NamedTuple):
    """All stages of one model on its way to the file, and the images that it was calibrated with."""

    model: nn.Module
    simulated: fx.GraphModule
    conversion: PassResult
    path: Path
    images: Tensor

    @property
    def converted(self) -> fx.GraphModule:
        return self.conversion.graph


@functools.cache
def _folder() -> Path:
    holder = tempfile.TemporaryDirectory()
    atexit.register(holder.cleanup)
    return Path(holder.name)


def ship(
    model: nn.Module,
    images: Tensor,
    name: str = "model",
    backend: Backend = FBGEMM,
    overrides: Overrides | None = None,
    batch_norm: str = "fold",
    opset: int = 13,
) -> Shipped:
    """Prepares, calibrates, converts and exports a model; returns every stage."""
    graph = calibrated(model, images, backend, overrides, batch_norm)
    conversion = convert(graph)
    path = _folder() / f"{name}.onnx"
    export_onnx(conversion.graph, images[:2], path, opset=opset)
    return Shipped(model, graph, conversion, path, images)


def run_torch(module: nn.Module, images: Tensor) -> NDArray[np.float32]:
    with torch.no_grad():
        return cast("NDArray[np.float32]", module(images).numpy())


def run_ort(
    path: Path, images: Tensor, *, optimize: bool = True, options: Mapping[str, str] | None = None
) -> NDArray[np.float32]:
    """Returns the output of the file in ONNX Runtime on one thread."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = 1
    levels = ort.GraphOptimizationLevel
    settings.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    for key, value in (options or {}).items():
        settings.add_session_config_entry(key, value)
    session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return cast("NDArray[np.float32]", session.run(None, {"input": images.numpy()})[0])


def steps_off(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Returns the largest difference, in units of 1/255 of the range of `a`."""
    return float(np.abs(a - b).max() / (a.max() - a.min()) * 255)


@functools.cache
def shipped(name: str) -> Shipped:
    """Returns the exported network of this name, cached for the tests of convert and of export."""
    if name == "vit":
        return ship(small_vit(), noise(16, 3, 32, 32), name)
    if name in SMALL:
        kind, shape = SMALL[name]
        torch.manual_seed(0)
        return ship(settle(kind(), *shape), noise(16, *shape), name)
    size = 64 if name == "efficientnet_b0" or "mobilenet" in name else 32
    return ship(build(name, size), noise(8, 3, size, size), name)


class Chain(nn.Module):
    """conv-bn-relu, conv-bn-relu6, conv: only convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, stride=2, groups=4, bias=False), nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 4, 1)
        self.relu, self.relu6 = nn.ReLU(inplace=True), nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return cast(Tensor, self.conv3(self.relu6(self.bn2(self.conv2(x)))))


class Mlp(nn.Module):
    """linear-relu-linear on [N, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc2(self.act(self.fc1(x))))


class Residual(nn.Module):
    """A max pool, a residual add followed by a ReLU, global pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2)
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.stem(x)))
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        y += x
        return cast(Tensor, self.fc(torch.flatten(self.avgpool(F.relu(y)), 1)))


class ConvFlattenLinear(nn.Module):
    """conv, flatten, linear: the output of the flatten has the range of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc(self.conv(x).flatten(1)))


class Block(nn.Module):
    """A transformer block on [N, 6, 16]: LayerNorm, attention, LayerNorm, MLP with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm2, self.fc1, self.act, self.fc2 = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.GELU(),
            nn.Linear(32, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return cast(Tensor, x + self.fc2(self.act(self.fc1(self.norm2(x)))))


class Gate(nn.Module):
    """A squeeze-and-excitation gate whose gate function is an argument."""

    def __init__(self, gate: type[nn.Module] = nn.Sigmoid) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1)
        self.fc1, self.relu, self.fc2, self.gate = nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1), gate()
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return cast(Tensor, self.last(x * self.gate(self.fc2(self.relu(self.fc1(self.pool(x)))))))


class HardGate(Gate):
    """The squeeze-and-excitation gate of MobileNetV3."""

    def __init__(self) -> None:
        super().__init__(nn.Hardsigmoid)


class GatedSum(nn.Module):
    """A sum, a HardSigmoid gate, a pool and a Linear: [N, 3, 10, 10] to [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.inner = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.gate, self.fc = nn.Conv2d(16, 16, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.inner(x) + x)
        x = x * F.hardsigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        return cast(Tensor, self.fc(x.mean((2, 3))))


class Concat(nn.Module):
    """Two branches, concatenated, and a conv."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = (
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(torch.cat([self.left(x), F.relu(self.right(x))], 1)))


class Gated(nn.Module):
    """conv-hardswish, conv-silu, conv."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(3, 8, 3), nn.Hardswish(inplace=True)
        self.conv2, self.act2 = nn.Conv2d(8, 8, 3), nn.SiLU(inplace=True)
        self.conv3 = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv3(self.act2(self.conv2(self.act1(self.conv1(x))))))


class Twice(nn.Module):
    """One conv called twice, with inputs of different ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(F.relu(self.conv(F.relu(self.conv(x))))))


SMALL: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "chain": (Chain, (3, 12, 12)),
    "mlp": (Mlp, (12,)),
    "residual": (Residual, (3, 12, 12)),
    "conv_flatten_linear": (ConvFlattenLinear, (3, 8, 8)),
    "block": (Block, (6, 16)),
    "gate": (Gate, (3, 8, 8)),
    "hard_gate": (HardGate, (3, 8, 8)),
    "concat": (Concat, (3, 8, 8)),
    "gated": (Gated, (3, 10, 10)),
    "twice": (Twice, (4, 8, 8)),
}
