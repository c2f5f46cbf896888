"""Tests of mean shifts by rounded weights: biases correct them, and inputs around zero cause none."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime as ort
import pytest
import torch
from chain import noise
from numpy.typing import NDArray
from torch import Tensor, nn

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.train.module import QATModule


class Edges(nn.Module):
    """A net whose first filters sum to zero, as edge detectors do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.conv.weight -= self.conv.weight.mean((1, 2, 3), keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(torch.relu(self.conv(x))))


def pixels(seed: int, middle: float = 128.0) -> Tensor:
    """Returns images [16, 3, 16, 16] of low contrast around `middle`."""
    return (middle + 6 * noise(16, 3, 16, 16, seed=seed)).clamp(middle - 32, middle + 32)


def shipped(path: Path, shifts: str, middle: float) -> QATModule:
    """Returns a calibrated module, and exports it to `path`."""
    module = QATModule(Edges().eval(), pixels(0, middle)[:2])
    module.mean_shifts = shifts
    module.calibrate([pixels(0, middle)])
    export_onnx(module.convert().graph, pixels(0, middle)[:2], path)
    return module


def mean_error(path: Path, middle: float) -> NDArray[np.float64]:
    """Returns the absolute mean error of the file per output channel ([4]) on other images."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = pixels(1, middle)
    found = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
    exact = Edges().eval()(images).detach().numpy()
    return np.asarray(np.abs((found - exact).mean((0, 2, 3), dtype=np.float64)))


def test_the_bias_takes_a_shift_back(tmp_path: Path) -> None:
    told = shipped(tmp_path / "a.onnx", "report", 128.0)
    module = shipped(tmp_path / "b.onnx", "correct", 128.0)
    before, after = (mean_error(tmp_path / name, 128.0).sum() for name in ("a.onnx", "b.onnx"))
    assert [one.site for one in told.shifted] == [one.site for one in module.shifted] == ["conv"]
    assert after < before / 3


def test_the_shift_is_that_of_the_mean_input(tmp_path: Path) -> None:
    """The shift sums, over input channels, the channel's mean times its kernel's summed rounding error."""
    (one,) = shipped(tmp_path / "a.onnx", "report", 128.0).shifted
    graph = QATModule(Edges().eval(), pixels(0)[:2])
    graph.calibrate([pixels(0)])
    conv = graph.graph.get_submodule("conv")
    rounded, _ = conv.quantized(conv.weight, conv.bias)  # type: ignore[operator]
    errors = (rounded - conv.weight).double()
    by_hand = (errors.sum((2, 3)) * pixels(0).double().mean((0, 2, 3))).sum(1)
    assert torch.tensor(one.shift).double().numpy() == pytest.approx(
        by_hand.detach().numpy(), rel=0.05, abs=2e-3
    )


def test_inputs_around_zero_change_nothing(tmp_path: Path) -> None:
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    modules = [shipped(path, shifts, 0.0) for path, shifts in zip(files, ("report", "correct"), strict=True)]
    assert [one.shifted for one in modules] == [[], []]
    assert files[0].read_bytes() == files[1].read_bytes()
