"""The configuration of a run that takes seconds, and readers of its files that do not use qatkit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from qatkit.config.schema import (
    CalibrationConfig,
    Config,
    DataConfig,
    ModelConfig,
    ScheduleConfig,
    TrainerConfig,
    VerifyConfig,
)

BUNDLE = {
    "model.int8.onnx",
    "model.float.onnx",
    "model.json",
    "ranges.json",
    "report.json",
    "report.html",
    "config.yaml",
    "last.ckpt",
}


SEED = 0


class Net(nn.Module):
    """Two convolutions with a residual add, and a classifier: 3,000 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(x + self.bn2(self.conv2(x)))
        return cast(Tensor, self.fc(self.pool(x).flatten(1)))


class Uneven(nn.Module):
    """A network that per-tensor scales suit badly: channels of the first convolution differ 16-fold in range.

    The second convolution cancels the differences.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, num_classes)
        factors = torch.logspace(-2, 2, 16, base=2)
        with torch.no_grad():
            self.conv1.weight.mul_(factors[:, None, None, None])
            self.conv1.bias.mul_(factors)  # type: ignore[union-attr]
            self.conv2.weight.div_(factors[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return cast(Tensor, self.fc(self.pool(x).flatten(1)))


def tiny(folder: Path, **changes: Any) -> Config:
    """Returns the configuration of a run that takes seconds: 8 x 8 digits, four float epochs, one QAT epoch."""
    config = Config(
        name="tiny",
        seed=SEED,
        output_dir=str(folder),
        model=ModelConfig(name=f"{__name__}.Net"),
        data=DataConfig(image_size=8, batch_size=32, workers=0),
        calibration=CalibrationConfig(images=64),
        schedule=ScheduleConfig(epochs=1, float_epochs=4, lr=1e-3),
        trainer=TrainerConfig(accelerator="cpu", progress=False),
        verify=VerifyConfig(latency_runs=3, threads=1, max_drop=5.0),
    )
    return replace(config, **changes)


def calibrate_only(folder: Path) -> Config:
    """Returns the configuration of `tiny` without training, so that the weights stay random."""
    config = tiny(folder, schedule=ScheduleConfig(epochs=0))
    config.verify.max_drop = None
    return config


def digits_test() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns the test images as the model receives them, [360, 3, 8, 8] in -1..1, and their labels."""
    bunch = load_digits()
    test = train_test_split(
        np.arange(len(bunch.images)), test_size=0.2, stratify=bunch.target, random_state=SEED
    )[1]
    pixels = np.round(bunch.images[test] * (255 / 16)) / 255
    grey = ((pixels - 0.5) / 0.5).astype(np.float32)
    return np.repeat(grey[:, None], 3, axis=1), bunch.target[test]


def logits(path: Path, images: NDArray[np.float32]) -> NDArray[np.float32]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return cast("NDArray[np.float32]", session.run(None, {"input": images})[0])


def top(scores: NDArray[np.float32], labels: NDArray[np.int64], k: int) -> float:
    """Returns the percentage of images whose label is among the `k` highest scores."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return float(100 * (best == labels[:, None]).any(axis=1).mean())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def report_of(folder: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads((folder / "report.json").read_text()))


def weights_of(path: Path) -> dict[str, Tensor]:
    return cast("dict[str, Tensor]", torch.load(path, weights_only=True)["state_dict"])
