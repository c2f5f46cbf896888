"""A torchvision detector of which only the backbone is quantized; the rest stays float Python code.

    uv run examples/detector_parts.py [FOLDER]

Random weights and pictures take the place of yours. `model=ssdlite` of train.py quantizes the same network as one file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torchvision.models.detection import ssdlite320_mobilenet_v3_large

from qatkit import Parts


def main(folder: str = "outputs/detector_parts") -> list[Path]:
    """Quantizes the backbone of an SSDlite; returns the written files."""
    torch.manual_seed(0)
    detector = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4).eval()
    pictures = [torch.rand(3, 320, 320) for _ in range(4)]
    parts = Parts(detector, ["backbone"], pictures[:1])
    parts.calibrate([[picture] for picture in pictures])  # train parts.model here, as you would the detector
    files = parts.export(Path(folder))
    found = parts.convert()([pictures[0]])[0]  # the whole detector, with int8 parts
    print(f"{len(found['boxes'])} boxes; {', '.join(str(file) for file in files.values())}")
    return list(files.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
