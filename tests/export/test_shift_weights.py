"""Tests of lowering int8 weights and zero points by 1: outputs are bit-identical, and kernels stay int8."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import onnx
import pytest
import torch
from chain import calibrated, noise, run_ort
from onnx import numpy_helper
from torch import Tensor, nn

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.quant.backends import FBGEMM
from qatkit.verify.audit import audit


class Convs(nn.Module):
    """Dense (one called twice), depthwise and grouped convolutions and a Linear: [N, 3, 12, 12] to [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.twice = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.groups, self.fc = nn.Conv2d(16, 32, 1, groups=2), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.twice(torch.relu(self.twice(x))) + x)
        x = torch.relu(self.groups(torch.relu(self.depthwise(x))))
        return cast(Tensor, self.fc(x.mean((2, 3))))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("shifted")
    converted = convert(calibrated(Convs().eval(), noise(32, 3, 12, 12))).graph
    paths = folder / "plain.onnx", folder / "shifted.onnx"
    for path, shifted in zip(paths, (False, True), strict=True):
        export_onnx(converted, noise(2, 3, 12, 12), path, weights_for_amx=shifted)
    return paths


def weights(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the int8 weights and zero points that a DequantizeLinear reads, by initializer."""
    graph = onnx.load(path).graph
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    pairs = [n.input for n in graph.node if n.op_type == "DequantizeLinear" and n.input[0] in held]
    return {i[0]: (held[i[0]], held[i[2]]) for i in pairs if held[i[0]].dtype == np.int8}


def test_weights_of_dense_convolutions_alone_are_one_lower(files: tuple[Path, Path]) -> None:
    plain, shifted = map(weights, files)
    assert plain.keys() == shifted.keys()
    changed = {name for name in plain if np.any(plain[name][1] != shifted[name][1])}
    assert changed == {"stem.weight", "twice.weight"}
    for name, (before, zero) in plain.items():
        after, moved = shifted[name]
        assert not zero.any() and np.all(moved == (-1 if name in changed else 0))
        # as int, because int8 could wrap around
        np.testing.assert_array_equal(after.astype(int) - moved.reshape(-1)[0], before.astype(int))


@pytest.mark.parametrize("optimize", [False, True])
def test_every_bit_is_the_same(files: tuple[Path, Path], optimize: bool) -> None:
    images = noise(16, 3, 12, 12, seed=5)
    plain, shifted = (run_ort(path, images, optimize=optimize) for path in files)
    np.testing.assert_array_equal(plain, shifted)


def test_it_runs_in_int8_as_before(files: tuple[Path, Path]) -> None:
    plain, shifted = (audit(path, options=FBGEMM.session_options) for path in files)
    assert shifted.ok and shifted.int8_share == plain.int8_share == 1.0
    assert [node.op for node in plain.nodes] == [node.op for node in shifted.nodes]
