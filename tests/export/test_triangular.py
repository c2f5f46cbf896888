"""Tests of triangular systems against torch, in ONNX Runtime and onnx's reference evaluator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from chain import noise, run_ort
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from qatkit.export.torch_to_onnx import export_onnx


class Solved(nn.Module):
    """Solves a triangular system whose matrix and right-hand side come from one input [batch, size, size].

    Values outside the matrix's triangle must have no effect, nor, if `unit`, those of its diagonal.
    """

    def __init__(self, upper: bool, left: bool, unit: bool) -> None:
        super().__init__()
        self.options: dict[str, bool] = {"upper": upper, "left": left, "unitriangular": unit}

    def forward(self, x: Tensor) -> Tensor:
        matrix = x + 4 * torch.eye(x.shape[-1])
        right = x[..., :3] if self.options["left"] else x[..., :3, :]
        solved: Tensor = torch.linalg.solve_triangular(matrix, right, **self.options)
        return solved


@pytest.mark.parametrize(
    ("upper", "left", "unit", "size"),
    [
        (False, True, True, 16),
        (False, True, False, 6),
        (False, False, False, 6),
        (True, True, True, 6),
        (True, False, False, 5),
        (True, True, False, 1),
    ],
)
def test_a_triangular_system_is_solved(
    upper: bool, left: bool, unit: bool, size: int, tmp_path: Path
) -> None:
    model, path = Solved(upper, left, unit).eval(), tmp_path / "model.onnx"
    x = 0.5 * noise(4, size, size)
    export_onnx(model, x[:2], path)
    assert onnx.load(str(path)).opset_import[0].version == 13
    wanted = model(x.double()).numpy()
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(run_ort(path, x), wanted, rtol=0, atol=2e-6 * scale)
    session = ReferenceEvaluator(str(path))
    (found,) = session.run(None, {session.input_names[0]: x.numpy()})
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=2e-6 * scale)
