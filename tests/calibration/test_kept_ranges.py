"""Checks that operators that only move values share the range of their input, which is observed once."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import onnx
import torch
from chain import noise, run_ort
from float_files import by_hand
from onnx import helper, numpy_helper
from torch import Tensor, nn

from qatkit import QATModule
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.quantizers import fake_quantizers
from qatkit.importing import import_onnx
from qatkit.importing.write_back import write_back

IMAGES = noise(16, 3, 8, 8)


class Moved(nn.Module):
    """A Conv and a ReLU, then a max pool, a transpose, a flatten and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv(x)))
        return cast(Tensor, self.fc(x.transpose(1, 3).reshape(-1, 256)))


def moved_file(path: Path) -> Path:
    """Writes an ONNX file with the operators of Moved."""
    draw = np.random.default_rng(0)
    weights = {
        "w": draw.normal(size=(16, 3, 3, 3)),
        "b": draw.normal(size=16),
        "fc": draw.normal(size=(256, 10)),
    }
    nodes = [
        helper.make_node("Conv", ["input", "w", "b"], ["y"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["y"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["m"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Transpose", ["m"], ["t"], "turn", perm=[0, 2, 3, 1]),
        helper.make_node("Flatten", ["t"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "fc"], ["output"], "fc"),
    ]
    return by_hand(path, nodes=nodes, weights=weights)


def check(module: QATModule, file: Path) -> None:
    """Checks that only the input and the ReLU's output are observed, and that moved tensors share the ReLU's scale."""
    ranges = {name: q.observer for name, q in fake_quantizers(module.graph).items()}
    assert list(ranges) == ["input", "conv"]
    graph = onnx.load(file).graph
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    scales = [float(constants[n.input[1]]) for n in graph.node if n.op_type == "QuantizeLinear"]
    assert len(scales) >= 4 and len(set(scales[1:])) == 1
    high = ranges["conv"]
    assert high is not None and scales[1] == np.float32(high.high.item()) / np.float32(255)


def test_moved_values_of_a_module_have_one_range(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = QATModule(Moved().eval(), IMAGES[:2])
    module.calibrate(IMAGES.split(8))
    export_onnx(module.convert().graph, IMAGES[:2], tmp_path / "int8.onnx")
    check(module, tmp_path / "int8.onnx")
    assert run_ort(tmp_path / "int8.onnx", IMAGES).shape == (16, 10)


def test_moved_values_of_a_given_file_have_one_range(tmp_path: Path) -> None:
    model = import_onnx(moved_file(tmp_path / "float.onnx"))
    module = QATModule(model, {"input": IMAGES[:2]})
    module.calibrate([{"input": one} for one in IMAGES.split(8)])
    write_back(model, module.convert().graph, tmp_path / "int8.onnx")
    check(module, tmp_path / "int8.onnx")
