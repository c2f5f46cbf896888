"""Checks that a released float model frees its memory, and that modules made from it still work."""

from __future__ import annotations

import torch
from chain import noise
from torch import nn

from qatkit.graph.captured import Captured
from qatkit.train.module import QATModule


def test_a_released_model_is_empty_and_its_module_works() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    ).eval()
    x = noise(2, 3, 8, 8)
    captured = Captured(model, x)
    module = QATModule(captured, x)
    module.calibrate([x])
    converted = module.convert().graph
    with torch.no_grad():
        before = module.eval()(x), converted(x)
        captured.release()
        after = module(x), converted(x)
    assert not any(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
