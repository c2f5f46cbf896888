"""Runs every Python block of the pages, in order, with a model and data in place of the reader's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from chain import noise, settle
from lightning import Trainer
from onnx.parser import parse_model
from page_commands import PAGES, label, python_blocks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_WITH_BLOCKS = [page for page in PAGES if python_blocks(page)]


class Classifier(nn.Sequential):
    """A classifier of images: [N, 3, 16, 16] to logits [N, 4]."""

    def __init__(self) -> None:
        conv, norm, head = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 4)
        super().__init__(conv, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


class Words(nn.Module):
    """A text model: ids and a mask [N, words] to logits [N, 4] and states [N, words, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.mix(self.table(ids) * mask[..., None]))
        return self.head(hidden.mean(1)), hidden


@pytest.mark.parametrize("page", _WITH_BLOCKS, ids=label)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    given = _GIVEN.get(label(page), lambda: iter(()))()
    for block in python_blocks(page):
        names |= next(given, {})
        exec(compile(block, label(page), "exec"), names)


def _pictures() -> dict[str, Any]:
    """Returns an image classifier and everything that trains it."""
    batches = [noise(16, 3, 16, 16, seed=seed) for seed in range(8)]
    quiet = Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    return {
        "model": settle(Classifier(), 3, 16, 16),
        "example": batches[0][:1],
        "batches": batches,
        "batches_of_images": batches,
        "train_loader": DataLoader(TensorDataset(torch.cat(batches), torch.arange(128) % 4), batch_size=16),
        "trainer": quiet,
    }


def _words() -> dict[str, Any]:
    """Returns a network with two named inputs."""
    draws = [torch.randint(0, 50, (4, 8)) for _ in range(4)]
    batches = [{"ids": ids, "mask": (ids > 5).float()} for ids in draws]
    return {"model": Words().eval(), **batches[0], "batches": batches}


def _detector() -> dict[str, Any]:
    """Returns a detector and images for it, under the names that the page uses."""
    detector = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3)
    images = [torch.rand(3, 96, 96) for _ in range(2)]
    return {"detector": detector.eval(), "image": images[0], "batches": [[one] for one in images]}


def _of_the_api() -> Iterator[dict[str, Any]]:
    yield _pictures()
    yield _pictures()
    yield _words()
    yield {}
    yield _detector()


def _streaming() -> Iterator[dict[str, Any]]:
    """Yields a session of a file with a state, and frames for it."""
    text = """<ir_version: 8, opset_import: ["": 17]>
        spotter (float[1, 1, n, 40] input, float[1, 128] state_0) => (float[1, 1] output, float[1, 128] state_0_next) {
            level = ReduceMean <keepdims = 0, axes = [1, 2]> (input)
            output = ReduceMean <keepdims = 1, axes = [1]> (level)
            state_0_next = Add (state_0, output)
        }"""
    file = parse_model(text).SerializeToString()
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    yield {"session": session, "np": np, "frames": [np.ones((1, 1, 2, 40), np.float32)] * 3}


_GIVEN: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "README.md": lambda: iter((_pictures(),)),
    "docs/guides/python-api.md": _of_the_api,
    "docs/guides/audio.md": _streaming,
}
