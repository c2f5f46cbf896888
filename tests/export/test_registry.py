"""Tests of building the operator table of torch's exporter once for all exports.

Files stay the same, and an export does not affect the next one.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import pytest
import torch
from torch import Tensor, nn
from torch._export import utils
from torch.onnx._internal.exporter._registration import ONNXRegistry

from qatkit.export.registry import tables_made_once
from qatkit.export.torch_to_onnx import export_onnx


class Gated(nn.Module):
    """A model whose operators are translated by several source files of torch's table."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(nn.functional.layer_norm(x, (8,)), 1) * x.sigmoid().cumsum(1).clamp(min=0)


def file(path: Path) -> bytes:
    export_onnx(Gated(), torch.randn(2, 8), path, opset=17)
    return path.read_bytes()


def test_files_are_those_of_tables_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [file(tmp_path / f"{i}.onnx") for i in range(2)]
    monkeypatch.setattr("qatkit.export.torch_to_onnx.tables_made_once", nullcontext)
    assert found == [file(tmp_path / "plain.onnx")] * 2


def test_a_translation_of_one_export_is_not_in_the_next_one(tmp_path: Path) -> None:
    opset = onnxscript.opset18

    def minus(x: onnxscript.FLOAT) -> onnxscript.FLOAT:
        return opset.Neg(x)

    def operators(**table: Any) -> list[str]:
        path = tmp_path / "relu.onnx"
        torch.onnx.export(nn.ReLU().eval(), (torch.randn(2, 8),), path, dynamo=True, verbose=False, **table)
        return [node.op_type for node in onnx.load(path).graph.node]

    with tables_made_once():
        assert operators(custom_translation_table={torch.ops.aten.relu.default: minus}) == ["Neg"]
        assert operators() == ["Relu"]


def test_an_operator_registered_between_exports_is_found(tmp_path: Path) -> None:
    file(tmp_path / "before.onnx")
    library = torch.library.Library("qatkit_test_registry", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.ops.qatkit_test_registry.twice(x)
            return found

    export_onnx(Twice(), torch.randn(2, 8), tmp_path / "twice.onnx")
    assert [node.op_type for node in onnx.load(tmp_path / "twice.onnx").graph.node] == ["Add"]


def test_afterwards_torch_is_as_it_was() -> None:
    before = vars(ONNXRegistry)["from_torchlib"].__func__, utils._materialize_cpp_cia_ops
    with tables_made_once():
        assert vars(ONNXRegistry)["from_torchlib"].__func__ is not before[0]
        assert utils._materialize_cpp_cia_ops is not before[1]
    assert (vars(ONNXRegistry)["from_torchlib"].__func__, utils._materialize_cpp_cia_ops) == before
