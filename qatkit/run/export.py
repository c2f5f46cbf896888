"""The export stage of a run: a graph as an ONNX file of the run's settings, and what model.json says of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qatkit import verify
from qatkit.bundle import INT8_FILE, model_json
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.errors import ConfigError
from qatkit.export.add_integer_ends import to_integer_io
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.simplify import float_baseline
from qatkit.module import QATModule
from qatkit.run.folder import backend_of
from qatkit.verify.session import run_images


def example_batch(config: Config, shape: tuple[int, ...]) -> Tensor:
    """[N, *shape] of noise to export a file with: of a fixed batch, its very size."""
    batch = 2 if config.export.dynamic_batch else config.verify.latency_batch
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))


def write_file(graph: nn.Module, config: Config, shape: tuple[int, ...], path: Path) -> None:
    """The ONNX file of a converted or a float graph for images of `shape` [C, H, W]."""
    example, wanted = example_batch(config, shape), config.export
    export_onnx(graph, example, path, opset=wanted.opset, dynamic_batch=wanted.dynamic_batch)


def write_float_file(model: nn.Module, config: Config, shape: tuple[int, ...], path: Path) -> None:
    """The file that the INT8 one is compared with: fused, and nothing more."""
    write_file(float_baseline(model, example_batch(config, shape)), config, shape, path)


def try_export(module: QATModule, config: Config) -> None:
    """A model that can't be exported or loaded fails here, in seconds, not after a night of training."""
    shape = tuple(module.example.shape[1:])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / INT8_FILE
        write_file(module.convert().graph, config, shape, path)
        if config.export.io == "uint8":
            check_integer_ends(module)
            to_integer_io(path, path, [0.0] * shape[0], [1.0] * shape[0], (-1.0, 1.0))


def check_integer_ends(module: QATModule) -> None:
    """Refuses a module whose backend takes no uint8 images, by ConfigError."""
    if not module.backend.for_onnxruntime:
        allowed = f"float32 with backend={module.backend.name}, which takes no uint8"
        raise ConfigError("export.io", "uint8", allowed)


def finish_file(path: Path, config: Config, data: DataModule) -> dict[str, Any]:
    """Gives the file integer ends where they are asked for; returns what model.json says of it."""
    about = describe(data)
    if config.export.io != "uint8":
        return about
    session = verify.open_session(
        path, threads=config.verify.threads, options=backend_of(config).session_options
    )
    low, high = 0.0, 0.0
    for images, _ in data.calibration_batches(config.calibration.images, config.calibration.batch_size):
        logits = run_images(session, images)
        low, high = min(low, float(logits.min())), max(high, float(logits.max()))
    ends = to_integer_io(path, path, data.preprocessing.mean, data.preprocessing.std, (low, high))
    return about | ends.as_dict()


def describe(data: DataModule) -> dict[str, Any]:
    """What model.json says of any file."""
    return model_json(data.preprocessing.as_dict(), data.classes)
