"""A float ONNX file, quantized in one call with arrays as calibration data.

    uv run examples/onnx_file.py [FILE.onnx] [FOLDER]

Without a file it exports a small float network first. Random numbers [8, 3, 32, 32] take the place of your
samples, so the only input of FILE.onnx must accept this shape.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from qatkit import Result, export_onnx, quantize


def float_file(path: Path) -> Path:
    """Writes a small float network as an ONNX file; returns its path."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    )
    export_onnx(network.eval(), torch.randn(1, 3, 32, 32), path)
    return path


def main(file: str | None = None, folder: str = "outputs/onnx_file") -> Result:
    """Quantizes the file, or a small network if `file` is None; returns the result."""
    path = Path(file) if file else float_file(Path(folder).with_suffix(".float.onnx"))
    draw = np.random.default_rng(0)
    batches = [draw.normal(size=(8, 3, 32, 32)).astype(np.float32) for _ in range(16)]
    return quantize(path, None, batches, [f"output_dir={folder}"])


if __name__ == "__main__":
    result = main(*sys.argv[1:])
    print(result.file, "meets its bounds" if result.met else "misses a bound")
