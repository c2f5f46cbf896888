"""Tests of rewriting MatMulNBits as DequantizeLinear and MatMul, in ONNX Runtime and onnx's evaluator."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import noise
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from packed_net import Mixed
from torch import Tensor, nn

from qatkit.export.dequantized_blocks import as_dequantized_blocks
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.quant.backends import WEIGHT_ONLY
from qatkit.quant.granularity import Granularity, PerBlock, PerChannel
from qatkit_verify.session import open_session

KINDS: dict[str, tuple[Granularity, bool]] = {
    "blocks": (PerBlock(32), False),
    "symmetric": (PerBlock(16), True),
    "channels": (PerChannel(0), False),
}
PACKED = {TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2}


class Words(nn.Module):
    """An embedding whose table is also the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 48), nn.Linear(48, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.head(torch.tanh(self.table(ids))))


def written(model: nn.Module, x: Tensor, path: Path, dtype: str, kind: str, scales: str, opset: int) -> None:
    granularity, symmetric = KINDS[kind]
    spec = replace(
        WEIGHT_ONLY.weight, dtype=dtype, granularity=granularity, symmetric=symmetric, scale_dtype=scales
    )
    graph = Captured(model.eval(), x).graph()
    prepare_qat(graph, replace(WEIGHT_ONLY, weight=spec), x)
    set_phase(graph, observe=False, quantize=True)
    export_onnx(convert(graph.eval()).graph, x, path, opset=opset)


def both(path: Path, x: Tensor) -> tuple[np.ndarray, np.ndarray, onnx.ModelProto]:
    """Returns ONNX Runtime's outputs before and after the rewrite, and the rewritten model."""

    def run() -> np.ndarray:
        session = open_session(path, threads=1)
        return np.asarray(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])

    before = run()
    as_dequantized_blocks(path)
    return before, run(), onnx.load(path)


@pytest.mark.parametrize(
    ("dtype", "kind", "scales"),
    [
        ("int4", "blocks", "float32"),
        ("int4", "blocks", "uint8"),
        ("int4", "symmetric", "float16"),
        ("int4", "channels", "float32"),
        ("int3", "symmetric", "float32"),
        ("int2", "blocks", "float32"),
        ("int2", "symmetric", "float32"),
    ],
)
def test_it_computes_what_the_packed_file_does(dtype: str, kind: str, scales: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, x = tmp_path / "model.onnx", noise(4, 3, 12, 12)
    written(Mixed(), x, path, dtype, kind, scales, 21)

    before, after, model = both(path, x)

    (reference,) = ReferenceEvaluator(model).run(None, {"input": x.numpy()})
    assert np.abs(np.asarray(reference) - before).max() <= 1e-5 * np.ptp(before)
    assert np.abs(after - before).max() <= 1e-5 * np.ptp(before)
    operators = Counter(node.op_type for node in model.graph.node)
    assert operators["DequantizeLinear"] == 2 and operators["MatMulNBits"] == 0
    assert {one.domain for one in model.opset_import} == {""}
    assert model.opset_import[0].version == (25 if dtype == "int2" else 21)
    held = [one for one in model.graph.initializer if one.name.endswith("integers")]
    assert len(held) == 2 and {one.data_type for one in held} <= PACKED


@pytest.mark.parametrize("outputs", [5, 6, 7, 8])
@pytest.mark.parametrize("kind", ["blocks", "symmetric"])
def test_two_bits_of_any_number_of_outputs(outputs: int, kind: str, tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", noise(4, 70)
    written(nn.Sequential(nn.Linear(70, outputs)), x, path, "int2", kind, "float32", 21)

    before, after, _ = both(path, x)

    assert np.abs(after - before).max() <= 1e-5 * np.ptp(before)


def test_a_file_of_opset_13_is_raised(tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", noise(4, 3, 12, 12)
    written(Mixed(), x, path, "int4", "blocks", "float32", 13)

    before, after, model = both(path, x)

    assert model.opset_import[0].version == 21
    assert np.abs(after - before).max() <= 1e-5 * np.ptp(before)


def test_tables_stay_rows_of_bytes(tmp_path: Path) -> None:
    path, ids = tmp_path / "model.onnx", torch.arange(12).reshape(3, 4)
    written(Words(), ids, path, "int4", "blocks", "float32", 21)

    before, after, model = both(path, ids)

    assert np.abs(after - before).max() <= 1e-5 * np.ptp(before)
    operators = Counter(node.op_type for node in model.graph.node)
    assert operators["DequantizeLinear"] == 1 and operators["MatMulNBits"] == 0 and operators["Gather"] >= 2


def test_onnxruntime_multiplies_by_the_packed_weight(tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", noise(4, 3, 12, 12)
    written(Mixed(), x, path, "int4", "blocks", "uint8", 21)
    as_dequantized_blocks(path)

    open_session(path, threads=1, optimized_path=tmp_path / "optimized.onnx")

    operators = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert operators["MatMulNBits"] == 2


def test_a_file_without_packed_weights_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_onnx(Mixed().eval(), noise(4, 3, 12, 12), path)
    before = path.read_bytes()

    as_dequantized_blocks(path)

    assert path.read_bytes() == before
    assert ort.InferenceSession(path).get_inputs()[0].name == "input"
