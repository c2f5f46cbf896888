"""A real network, exported and then quantized by ONNX Runtime's own tool, shared by the tests of verify."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torchvision
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from torch import nn
from torch.fx.experimental.optimization import fuse


class Files(NamedTuple):
    """A float module (BN folded) with its ONNX file, and the quantized file."""

    module: nn.Module
    float_path: Path
    int8_path: Path


class _Noise(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        random = np.random.default_rng(1)
        batches = [random.standard_normal((4, 3, 64, 64), dtype=np.float32) for _ in range(2)]
        self._batches = iter(batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"input": batch}


def export(module: nn.Module, path: Path, size: int, channels: int = 3) -> None:
    """Exports a float ONNX file with a dynamic batch axis and no external data."""
    batch = torch.export.Dim("N", min=1, max=1024)
    torch.onnx.export(
        module,
        (torch.zeros(2, channels, size, size),),
        path,
        input_names=["input"],
        output_names=["output"],
        dynamic_shapes=({0: batch},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


@functools.cache
def quantized_resnet18() -> Files:
    """Returns a resnet18 for 64x64 images and 10 classes, with random weights and BN means, and its files."""
    holder = tempfile.TemporaryDirectory()
    atexit.register(holder.cleanup)
    torch.manual_seed(0)
    module = torchvision.models.resnet18(num_classes=10).eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.bias, std=0.1)
            assert layer.running_mean is not None
            layer.running_mean.normal_(std=0.1)
    module = fuse(module)
    folder = Path(holder.name)
    float_path, int8_path = folder / "float.onnx", folder / "int8.onnx"
    export(module, float_path, 64)
    quantize_static(
        float_path,
        int8_path,
        _Noise(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return Files(module, float_path, int8_path)
