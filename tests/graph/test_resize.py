"""Checks that a Resize that repeats values runs in 8 bits, and one that interpolates in float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import noise
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit import QATModule, export_onnx
from qatkit.quant.backends import FBGEMM, QNNPACK, Backend


class Pyramid(nn.Module):
    """A feature map that is upsampled and concatenated with an earlier one."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up = nn.Upsample(scale_factor=2, mode=mode)
        self.join = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.relu(self.stem(x))
        coarse = F.relu(self.down(fine))
        larger = F.interpolate(coarse, size=fine.shape[2:], mode=self.mode)
        y: Tensor = self.join(torch.cat([fine, larger, self.up(coarse)], 1))
        return y


@pytest.mark.parametrize("backend", [FBGEMM, QNNPACK], ids=lambda one: one.name)
@pytest.mark.parametrize(("mode", "of_bytes"), [("nearest", True), ("bilinear", False)])
def test_resize_moves_bytes_where_it_repeats_values(
    mode: str, of_bytes: bool, backend: Backend, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = QATModule(Pyramid(mode), noise(2, 3, 16, 16), backend=backend)
    module.calibrate([noise(16, 3, 16, 16, seed=seed) for seed in range(3)])
    assert any("float input" in reason for _, reason in module.skipped) is not of_bytes
    converted = module.eval().convert().graph
    export_onnx(converted, noise(2, 3, 16, 16), tmp_path / "int8.onnx")
    images = noise(4, 3, 16, 16, seed=9)
    with torch.no_grad():
        wanted = converted(images).numpy()
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        for key, value in backend.session_options.items():
            options.add_session_config_entry(key, value)
        session = ort.InferenceSession(
            str(tmp_path / "int8.onnx"), options, providers=["CPUExecutionProvider"]
        )
        (found,) = session.run(None, {"input": images.numpy()})
        np.testing.assert_allclose(found, wanted, atol=1e-6 if of_bytes else 0.02)
    graph = onnx.load(str(tmp_path / "optimized.onnx")).graph
    before = {output: node.op_type for node in graph.node for output in node.output}
    resizes = [node for node in graph.node if node.op_type == "Resize"]
    assert len(resizes) == 2
    assert all((before[node.input[0]] != "DequantizeLinear") is of_bytes for node in resizes)
