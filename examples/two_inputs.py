"""A model of an image and a vector that returns a mapping, from your own training loop to a verified INT8 file.

    uv run examples/two_inputs.py [FOLDER]

The data are made up: blobs whose position in the image determines the class, and a size that the vector contains.
`QATModule` gets an example of the model's arguments, here (image, vector), and batches have the same structure.
Calling the module returns the outputs as a tuple in the order of `graph.meta["outputs"]`. In the file, inputs are
named after the arguments, and outputs after the mapping's keys.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit import QATModule, export_onnx
from qatkit.records.results import Parity
from qatkit.verify.parity import parity

CLASSES = 4


class Blobs(nn.Module):
    """A network from an image [N, 1, 16, 16] and a vector [N, 3] to logits [N, CLASSES] and a number [N, 1]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.beside = nn.Linear(3, width)
        self.classify, self.measure = nn.Linear(17 * width, CLASSES), nn.Linear(17 * width, 1)

    def forward(self, image: Tensor, vector: Tensor) -> dict[str, Tensor]:
        features = torch.cat([self.body(image).flatten(1), torch.relu(self.beside(vector))], 1)
        return {"logits": self.classify(features), "size": self.measure(features)}


def blobs(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Returns the model's inputs, labels [N] and sizes [N, 1]."""
    draw = torch.Generator().manual_seed(seed)
    labels, size = torch.randint(0, CLASSES, (count,), generator=draw), torch.rand(count, 1, generator=draw)
    rows, columns = 4 + 8 * (labels // 2), 4 + 8 * (labels % 2)
    grid = torch.arange(16.0)
    away = (grid[:, None] - rows[:, None, None]) ** 2 + (grid - columns[:, None, None]) ** 2
    image = torch.exp(-away / 6)[:, None] + 0.3 * torch.randn(count, 1, 16, 16, generator=draw)
    vector = torch.cat([size, torch.randn(count, 2, generator=draw)], 1)
    return (image, vector), labels, size


def train(model: nn.Module, steps: int, lr: float) -> None:
    """Trains in a plain loop, which calls the float model and the prepared module in the same way."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    model.train()
    for step in range(steps):
        inputs, labels, size = blobs(64, seed=step)
        found = model(*inputs)
        logits, measured = found.values() if isinstance(found, dict) else found
        optimizer.zero_grad()
        (F.cross_entropy(logits, labels) + 5 * F.mse_loss(measured, size)).backward()
        optimizer.step()


def main(folder: Path, steps: int = 60) -> Parity:
    """Trains, quantizes, fine-tunes and exports to `folder`; returns the parity of the file with the module."""
    torch.manual_seed(0)
    model = Blobs()
    train(model, steps, lr=1e-2)
    module = QATModule(model.eval(), blobs(2, seed=0)[0])
    module.calibrate(blobs(64, seed)[0] for seed in range(1000, 1004))
    train(module, steps // 4, lr=1e-4)
    module.ready_to_convert()
    converted, path = module.convert().graph, folder / "blobs.int8.onnx"
    export_onnx(converted, module.example, path)
    found = parity(converted, path, [blobs(64, seed)[0] for seed in (2000, 2001)])
    print(
        f"{path} agrees with the converted module on {100 * found.agreement:.1f} % of {found.images} images"
    )
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
