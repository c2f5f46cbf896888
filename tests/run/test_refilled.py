"""Tests of writing a graph's file again with other values: by refilling the first file or by exporting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from chain import noise
from torch import nn

from qatkit.choose.judge import Files
from qatkit.config.schema import ExportConfig, OverrideConfig
from qatkit.train.module import QATModule

NETS: dict[str, tuple[Callable[[], list[nn.Module]], dict[str, OverrideConfig]]] = {
    "relu": (lambda: [nn.BatchNorm2d(8), nn.ReLU()], {}),
    "prelu": (lambda: [nn.PReLU(8)], {}),
    "group_norm": (lambda: [nn.GroupNorm(2, 8), nn.ReLU()], {}),
    "layer_norm": (lambda: [nn.LayerNorm([8, 6, 6]), nn.GELU()], {}),
    "uint4": (lambda: [nn.ReLU()], {"*": OverrideConfig(weight_dtype="int4", activation_dtype="uint4")}),
}


@pytest.mark.parametrize(
    "net",
    [pytest.param(one, marks=pytest.mark.slow) if one in ("group_norm", "relu") else one for one in NETS],
)
def test_each_file_computes_what_its_module_does(net: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    middle, overrides = NETS[net]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), *middle(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).eval()
    x = noise(16, 3, 8, 8)
    files = Files(x[:2], tmp_path, ExportConfig())
    for factor in (1.0, 1.5, 0.7):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor).add_(0.02 * (factor - 1))
        module = QATModule(model, x[:2], overrides=overrides)
        module.calibrate([factor * x])
        session = ort.InferenceSession(files.write(module.graph), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"input": x.numpy()})
        wanted = module.convert().graph(x).detach().numpy()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
