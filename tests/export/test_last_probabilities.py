"""Tests that confident scores of a float16 file stay distinct and close to those of the float file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from qatkit.export import ort_modes
from qatkit.export.last_probabilities import last_probabilities


class Scores(nn.Module):
    """Confident scores as in YOLOX (objectness times class) or SSD (softmax with background), or a gate."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(16, 4)

    def forward(self, rows: Tensor) -> Tensor:
        logits = 4 * self.linear(rows) + 9
        if self.kind == "product":
            both: Tensor = logits[..., :1].sigmoid() * logits[..., 1:].sigmoid()
            return both.transpose(1, 2)
        if self.kind == "softmax":
            return torch.cat([torch.zeros_like(logits[..., :1]), logits[..., :1]], -1).softmax(-1)[..., 1:]
        gated: Tensor = self.linear(rows) * self.linear(rows).sigmoid()  # not probabilities
        return gated


def files(kind: str, folder: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    plain, half = folder / "float.onnx", folder / "float16.onnx"
    torch.onnx.export(Scores(kind), (torch.zeros(1, 300, 16),), plain, opset_version=18, dynamo=False)
    ort_modes.float16(plain, half)
    return plain, half


@pytest.mark.parametrize("kind", ["product", "softmax"])
def test_confident_scores_of_a_float16_file_differ(kind: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(1, 300, 16)).astype(np.float32)
    found = []
    for path in files(kind, tmp_path):
        session = ort.InferenceSession(path)
        found.append(session.run(None, {session.get_inputs()[0].name: rows})[0].astype(np.float64).ravel())
    exact, half = found
    sure = exact > 0.9995
    assert sure.sum() > 100
    # As close as the eleven bits of the logits allow, far below the 2^-11 of float16 itself.
    assert abs(exact - half)[sure].max() < 2.0**-15
    assert len(np.unique(half[sure])) > 0.4 * len(np.unique(exact[sure]))


def test_only_what_leads_to_an_output_is_kept(tmp_path: Path) -> None:
    plain, _ = files("product", tmp_path)
    model = ir.load(plain)
    kinds = [node.op_type for node in model.graph if node.name in last_probabilities(model)]
    assert sorted(kinds) == ["Mul", "Sigmoid", "Sigmoid", "Transpose"]
    plain, _ = files("gate", tmp_path)
    assert last_probabilities(ir.load(plain)) == []
