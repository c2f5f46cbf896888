"""Tests of skipping operators without a promotion rule in torch's type promotion: files stay the same."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from chain import Chain, noise, run_ort, run_torch
from torch import Tensor, nn
from torch.onnx._internal.fx.passes import type_promotion

from qatkit.export.promotions import promoted_where_needed
from qatkit.export.torch_to_onnx import export_onnx


class Mixed(nn.Module):
    """A model where numbers, booleans and integers meet floats, around a chain that needs no promotion."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, x: Tensor) -> Tensor:
        x = self.chain(x * 2 + (x > 0))
        steps = torch.arange(x.shape[-1])
        return torch.matmul(x, (steps + 1) / 2) * 3 + (steps[:1] == 0)


def test_a_file_is_that_of_the_exporters_own_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Mixed().eval(), noise(3, 3, 12, 12)
    export_onnx(model, x, tmp_path / "ours.onnx")
    monkeypatch.setattr("qatkit.export.torch_to_onnx.promoted_where_needed", nullcontext)
    export_onnx(model, x, tmp_path / "torchs.onnx")

    assert (tmp_path / "ours.onnx").read_bytes() == (tmp_path / "torchs.onnx").read_bytes()
    assert abs(run_ort(tmp_path / "ours.onnx", x) - run_torch(model, x)).max() < 1e-4


def test_operators_without_a_rule_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, ran = type_promotion._TypePromotionInterpreter.run_node, []

    def noted(self: type_promotion._TypePromotionInterpreter, node: torch.fx.Node) -> object:
        ran.append(str(node.target))
        return own(self, node)

    monkeypatch.setattr(type_promotion._TypePromotionInterpreter, "run_node", noted)
    export_onnx(Mixed().eval(), noise(2, 3, 12, 12), tmp_path / "model.onnx")

    assert "aten.mul.Tensor" in ran and not any(target.startswith("aten.conv") for target in ran)


def test_afterwards_torch_is_as_it_was() -> None:
    before = vars(type_promotion._TypePromotionInterpreter)["run_node"]
    with promoted_where_needed():
        assert vars(type_promotion._TypePromotionInterpreter)["run_node"] is not before
    assert vars(type_promotion._TypePromotionInterpreter)["run_node"] is before
