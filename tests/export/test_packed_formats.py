"""Tests of packed weights in number formats, such as mxfp4.

ONNX Runtime and onnx's evaluator unpack them to the simulation's bits, and the file holds no float weight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import Shipped, noise, ship
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.format_modules import HeldWeight
from qatkit.quant.backends import SIMULATED, Backend
from qatkit.quant.formats.table import DEQUANTIZED, FORMATS


class Products(nn.Module):
    """Two Convs, a MatMul with a transposed weight and a Gemm.

    A row of a weight is one block or several, of which the last may be shorter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 40, 3), nn.Conv2d(40, 72, 1)
        self.third, self.head = nn.Linear(72, 64), nn.Linear(64, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        x = self.third(x.flatten(2).transpose(1, 2))
        found: torch.Tensor = self.head(torch.relu(x).mean(1))
        return found


def backend(name: str) -> Backend:
    weight = replace(SIMULATED.weight, dtype=name)
    return replace(SIMULATED, weight=weight, activation=replace(SIMULATED.activation, dtype="float16"))


@cache
def made(name: str) -> Shipped:
    torch.manual_seed(0)
    model = Products()
    with torch.no_grad():
        model.first.weight[0].zero_()
        model.second.weight[:8] *= 2.0 ** torch.arange(-60, -52)[:, None, None, None]
        model.third.weight[3, 5] = -0.0
    return ship(model.eval(), noise(4, 3, 8, 8), f"packed_{name}", backend(name))


def weights(path: Path, evaluator: str) -> list[NDArray[np.float32]]:
    """Computes the weights that Conv, MatMul and Gemm read, in onnx's evaluator ("onnx") or ONNX Runtime."""
    model = onnx.load(path)
    names = [n.input[1] for n in model.graph.node if n.op_type in ("Conv", "MatMul", "Gemm")]
    ends = {one.name for one in model.graph.initializer}
    wanted = [node for node in model.graph.node if node.domain == "" and _constant(node, ends)]
    outputs = [helper.make_tensor_value_info(one, onnx.TensorProto.FLOAT, None) for one in names]
    graph = helper.make_graph(wanted, "weights", [], outputs, list(model.graph.initializer))
    part = helper.make_model(graph, opset_imports=model.opset_import[:1], ir_version=model.ir_version)
    if evaluator == "onnx":
        found: Any = ReferenceEvaluator(part).run(None, {})
    else:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        session = ort.InferenceSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found = session.run(None, {})
    return list(found)


def _constant(node: onnx.NodeProto, known: set[str]) -> bool:
    """Tells whether all inputs are constants; if so, adds the outputs to `known`."""
    if not set(node.input) <= known:
        return False
    known.update(node.output)
    return True


def expected(shipped: Shipped) -> list[NDArray[np.float32]]:
    parts = shipped.converted.modules()
    held = [one for part in parts if isinstance(one := getattr(part, "held", None), HeldWeight)]
    return [one.values.numpy() for one in held]


def turned(
    found: list[NDArray[np.float32]], shipped: Shipped
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Pairs each weight of a file, in the module's layout, with the module's weight."""
    pairs = zip(found, expected(shipped), strict=True)
    return [(one if one.shape == other.shape else one.T, other) for one, other in pairs]


def same_bits(found: list[NDArray[np.float32]], wanted: list[NDArray[np.float32]]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        own = one if one.shape == other.shape else one.T
        np.testing.assert_array_equal(np.ascontiguousarray(own).view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("evaluator", ["onnx", "onnxruntime"])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_have_the_bits_of_the_simulation(name: str, evaluator: str) -> None:
    shipped = made(name)
    same_bits(weights(shipped.path, evaluator), expected(shipped))


@pytest.mark.parametrize("name", FORMATS)
def test_no_float_weight_is_left_in_the_file(name: str) -> None:
    shipped = made(name)
    arrays = [numpy_helper.to_array(one) for one in onnx.load(shipped.path).graph.initializer]
    values = sum(one.size for one in expected(shipped))
    size = sum(one.nbytes for one in arrays)
    # The rest is for scales of shorter blocks, biases, block indices, and tables that all weights share.
    assert values * FORMATS[name].bits / 8 < size < values * FORMATS[name].bits / 8 + 8000
    assert max(one.size for one in arrays if one.dtype == np.float32) <= 512


@pytest.mark.parametrize("evaluator", ["onnx", "onnxruntime"])
@pytest.mark.parametrize("name", DEQUANTIZED)
def test_dequantize_linear_gives_the_same_bits(name: str, evaluator: str, tmp_path: Path) -> None:
    shipped = made(name)
    path = tmp_path / "model.onnx"
    export_onnx(shipped.converted, shipped.images[:2], path, opset=DEQUANTIZED[name], dequantize=True)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    pairs = sum(kind == "QuantizeLinear" for kind in kinds)
    assert kinds.count("DequantizeLinear") - pairs == len(expected(shipped))
    found = weights(path, evaluator)
    if evaluator == "onnx":  # its Sum of one input starts at zero and loses -0
        found = [
            np.where(one == 0, np.copysign(np.float32(0), other), one)
            for one, other in turned(found, shipped)
        ]
    same_bits(found, expected(shipped))


def test_a_weight_with_a_nan_stays_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Products()
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    shipped = ship(model.eval(), noise(4, 3, 8, 8), "packed_nan", backend("mxfp4"))
    found = [numpy_helper.to_array(one) for one in onnx.load(shipped.path).graph.initializer]
    assert any(one.shape == (9, 64) and np.isnan(one).any() for one in found)
