"""One table for all exports: the same files as without it, and what one export adds is not in the next one's."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import pytest
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from qatkit.export.registry import table_made_once
from qatkit.export.torch_to_onnx import export_onnx


class Gated(nn.Module):
    """Operators of several of the table's files."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(nn.functional.layer_norm(x, (8,)), 1) * x.sigmoid().cumsum(1).clamp(min=0)


def file(path: Path) -> bytes:
    export_onnx(Gated(), torch.randn(2, 8), path, opset=17)
    return path.read_bytes()


def test_files_are_those_of_a_table_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [file(tmp_path / f"{i}.onnx") for i in range(2)]
    monkeypatch.setattr("qatkit.export.torch_to_onnx.table_made_once", nullcontext)
    assert found == [file(tmp_path / "plain.onnx")] * 2


def test_a_translation_of_one_export_is_not_in_the_next_one(tmp_path: Path) -> None:
    opset = onnxscript.opset18

    def minus(x: onnxscript.FLOAT) -> onnxscript.FLOAT:
        return opset.Neg(x)

    def operators(**table: Any) -> list[str]:
        path = tmp_path / "relu.onnx"
        torch.onnx.export(nn.ReLU().eval(), (torch.randn(2, 8),), path, dynamo=True, verbose=False, **table)
        return [node.op_type for node in onnx.load(path).graph.node]

    with table_made_once():
        assert operators(custom_translation_table={torch.ops.aten.relu.default: minus}) == ["Neg"]
        assert operators() == ["Relu"]


def test_afterwards_torch_is_as_it_was() -> None:
    before = vars(ONNXRegistry)["from_torchlib"].__func__
    with table_made_once():
        assert vars(ONNXRegistry)["from_torchlib"].__func__ is not before
    assert vars(ONNXRegistry)["from_torchlib"].__func__ is before
