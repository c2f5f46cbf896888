"""A user's task in one file: the rotation angle of a digit, with its data source and model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.functional import rotate

from qatkit.config.schema import ScheduleConfig
from qatkit.data import Preprocessing, Splits
from qatkit.tasks import Task
from qatkit_verify.records import Metric, TaskNames

LARGEST = 60.0  # degrees, in both directions
TEST = 200  # images


class Angle(Task):
    """Regression of angles; the model's outputs [N, 1] are fractions of the largest angle."""

    names = TaskNames(
        "angle",
        "image regression",
        (Metric("MAE", unit="degrees", higher_is_better=False),),
        decision="angle within 20 degrees",
        outputs="angles",
    )

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        return F.mse_loss(output.float()[:, 0], targets / LARGEST)

    def values(self, outputs: Any, targets: Any) -> Any:
        return np.abs(LARGEST * outputs[:, 0].astype(np.float64) - targets)

    def decision(self, outputs: Any) -> Any:
        return np.round(LARGEST * outputs[:, 0] / 20).astype(np.int64)

    def width(self, classes: Any) -> int:
        return 1


class Turned:
    """A data set of digits of 8 x 8 pixels, each rotated by its target."""

    def __init__(self, images: Tensor, angles: list[float]) -> None:
        self.images, self.targets = images, angles

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return rotate(self.images[index], self.targets[index]), self.targets[index]


def load(root: str | None, download: bool, seed: int) -> Splits:
    """Returns scikit-learn's digits, rotated by random angles; the last ones are the test split."""
    pixels = np.round(load_digits().images * (255 / 16)).astype(np.uint8)
    images = torch.from_numpy(pixels)[:, None]
    angles = np.random.default_rng(seed).uniform(-LARGEST, LARGEST, len(images)).round(3).tolist()
    train, test = Turned(images[:-TEST], angles[:-TEST]), Turned(images[-TEST:], angles[-TEST:])
    return Splits(train, test, (), Preprocessing(8, 8, (0.5,), (0.5,)))


class Net(nn.Module):
    """A model with two convolutions and two linear layers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.hidden, self.last = nn.Linear(16 * 16, 32), nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x)))).flatten(1)
        found: Tensor = self.last(torch.relu(self.hidden(x)))
        return found
