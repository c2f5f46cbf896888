"""A float ONNX file, quantized in one call with arrays as calibration data.

    uv run examples/onnx_file.py [FILE.onnx] [FOLDER]

Without a file it exports a small float network first. Random numbers take the place of your samples: their shapes and
types are read from the file, and a size that the file leaves open is 8 for the batch and 32 for other axes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

from qatkit import Result, export_onnx, quantize

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def float_file(path: Path) -> Path:
    """Writes a small float network as an ONNX file; returns its path."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    )
    export_onnx(network.eval(), torch.randn(1, 3, 32, 32), path)
    return path


def samples(one: ort.NodeArg, draw: np.random.Generator) -> Array:
    """Returns a batch of random samples for an input: normal numbers, or 0 and 1 if it is of integers or booleans."""
    batch, *sizes = (size if isinstance(size, int) else None for size in one.shape)
    shape = (batch or 8, *(size or 32 for size in sizes))
    kind = {"float": "float32", "double": "float64"}.get(name := one.type[len("tensor(") : -1], name)
    drawn = draw.normal(size=shape) if kind.startswith("float") else draw.integers(0, 2, shape)
    return drawn.astype(kind)


def main(file: str | None = None, folder: str = "outputs/onnx_file") -> Result:
    """Quantizes the file, or a small network if `file` is None; returns the result."""
    path = Path(file) if file else float_file(Path(folder).with_suffix(".float.onnx"))
    inputs, draw = ort.InferenceSession(path).get_inputs(), np.random.default_rng(0)
    batches = [{one.name: samples(one, draw) for one in inputs} for _ in range(16)]
    return quantize(path, None, batches, [f"output_dir={folder}"])


if __name__ == "__main__":
    result = main(*sys.argv[1:])
    print(result.file, "meets its bounds" if result.met else "misses a bound")
