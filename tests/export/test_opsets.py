"""Tests of opsets 13 to 21: files are legal and match their module in ONNX Runtime and onnx's evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import onnx
import pytest
import torch
from chain import noise, run_ort, run_torch, shipped
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.export.torch_to_onnx import export_onnx

OPSETS = range(13, 22)
# The lowest opset and those with new forms (14, 17, 18, 21); the others are slow tests.
CHANGES = (13, 14, 17, 18, 21)
CHOSEN = [opset if opset in CHANGES else pytest.param(opset, marks=pytest.mark.slow) for opset in OPSETS]
# The first opset that has an operator.
SINCE = {"LayerNormalization": 17, "HardSwish": 14}


class Many(nn.Module):
    """A model of operators that ONNX writes differently in different opsets.

    LayerNorm, Hardswish, split, means, pad, norm and scatter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.bn = nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.BatchNorm2d(8)
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.act(self.conv(F.pad(x, (1, 0, 2, 1)))))
        a, b = x.chunk(2, 1)
        x = torch.cat([a.amax(2), b.mean(2)], 1).transpose(1, 2)
        x = self.norm(x) / (1 + torch.linalg.vector_norm(x, dim=2, keepdim=True))
        y = x.clone()
        y[:, 0] = 2 * x[:, 1]
        return cast(Tensor, self.fc(y).prod(1))


def reference(path: Path, images: Tensor) -> NDArray[np.float32]:
    """Returns a file's output in onnx's reference evaluator."""
    outputs = list(ReferenceEvaluator(str(path)).run(None, {"input": images.numpy()}))
    return cast("NDArray[np.float32]", outputs[0])


@pytest.mark.parametrize("opset", CHOSEN)
def test_a_float_model_is_the_same_function_at_every_opset(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images, path = Many().eval(), noise(2, 3, 9, 9), tmp_path / "model.onnx"
    export_onnx(model, images, path, opset=opset)
    proto = onnx.load(str(path))
    onnx.checker.check_model(proto, full_check=True)
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", opset)]
    kinds = {node.op_type for node in proto.graph.node}
    assert {kind: kind in kinds for kind in SINCE} == {kind: opset >= at for kind, at in SINCE.items()}
    expected = run_torch(model, images)
    for optimize in (False, True):
        np.testing.assert_allclose(run_ort(path, images, optimize=optimize), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(reference(path, images), expected, rtol=1e-4, atol=1e-6)


# The lowest and highest opset for each network, and those with new forms that it uses.
INT8_CHOSEN = {
    (name, opset) for name in ("residual", "block", "hard_gate", "gated") for opset in (13, 21)
} | {
    ("block", 17),
    ("hard_gate", 14),
    ("gated", 18),
}


@pytest.mark.parametrize(
    ("name", "opset"),
    [
        pytest.param(name, opset, marks=[] if (name, opset) in INT8_CHOSEN else [pytest.mark.slow])
        for name in ("residual", "block", "hard_gate", "gated")
        for opset in OPSETS
    ],
)
def test_an_int8_file_is_the_same_function_at_every_opset(name: str, opset: int, tmp_path: Path) -> None:
    """The file runs in ONNX Runtime without optimizations and, from opset 19 on, in onnx's evaluator."""
    network, path = shipped(name), tmp_path / "model.onnx"
    export_onnx(network.converted, network.images[:2], path, opset=opset)
    onnx.checker.check_model(str(path), full_check=True)
    images = network.images[:4]
    expected = run_torch(network.converted, images)
    atol = 0.02 * float(np.ptp(expected))  # for activations at a tie
    np.testing.assert_allclose(run_ort(path, images, optimize=False), expected, rtol=0, atol=atol)
    if opset >= 19:
        np.testing.assert_allclose(reference(path, images), expected, rtol=0, atol=atol)
