"""A torchvision classifier, trained on labelled images and quantized in one call.

    uv run examples/torchvision_classifier.py [FOLDER]

The digits of scikit-learn take the place of your data. The run has float training, calibration, two epochs of
quantization-aware training, and a verified file.
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torchvision.models import resnet18

from qatkit import Result, quantize


def main(folder: str = "outputs/torchvision_classifier") -> Result:
    """Trains on the digits for twelve float epochs and two quantized ones; returns the result."""
    torch.manual_seed(0)
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(pixels, size=32, mode="bilinear").expand(-1, 3, -1, -1) - 0.5
    labels = torch.tensor(digits.target)
    batches = list(zip(images.split(64), labels.split(64), strict=True))
    settings = [
        "task=classification",
        "schedule=quickstart",
        "schedule.float_epochs=12",
        "schedule.epochs=2",
        "verify.max_drop=2",
        f"output_dir={folder}",
    ]
    return quantize(resnet18(num_classes=10), images[:2], batches[:20], settings, test_batches=batches[20:])


if __name__ == "__main__":
    result = main(*sys.argv[1:])
    sys.exit(0 if result.met else 1)
