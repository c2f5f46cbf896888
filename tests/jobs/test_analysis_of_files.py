"""Tests of `analysis.tensors` in runs on a given ONNX file with several inputs or a fixed batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qatkit.config.schema import (
    AnalysisConfig,
    CalibrationConfig,
    Config,
    DataConfig,
    TrainerConfig,
    VerifyConfig,
)
from qatkit.data.drawn import drawn
from qatkit.jobs import quantize_file


def _file(path: Path, batch: int | str) -> Path:
    """Writes a model whose two inputs have the same batch size and different numbers of axes."""
    draw = np.random.default_rng(0)
    weights = {
        "w": draw.normal(0, 0.3, (8, 3, 3)),
        "a": draw.normal(0, 0.3, (6, 8)),
        "b": draw.normal(0, 0.3, (8, 4)),
    }
    nodes = [
        helper.make_node("Conv", ["signal", "w"], ["c"], "conv", pads=[1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("ReduceMean", ["r"], ["mean"], "mean", axes=[2], keepdims=0),
        helper.make_node("Gemm", ["state", "a"], ["s"], "gemm"),
        helper.make_node("Add", ["mean", "s"], ["sum"], "add"),
        helper.make_node("Gemm", ["sum", "b"], ["y"], "last"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "net",
        [value("signal", TensorProto.FLOAT, [batch, 3, 12]), value("state", TensorProto.FLOAT, [batch, 6])],
        [value("y", TensorProto.FLOAT, [batch, 4])],
        [numpy_helper.from_array(one.astype(np.float32), name) for name, one in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


@pytest.mark.parametrize("batch", [1, "n"])
def test_every_tensor_is_compared_in_onnx_runtime(batch: int | str, tmp_path: Path) -> None:
    config = Config(
        name="file",
        output_dir=str(tmp_path / "run"),
        onnx=str(_file(tmp_path / "float.onnx", batch)),
        mode="static",
        data=DataConfig(f"{drawn.__module__}.drawn", workers=0, count=8),
        calibration=CalibrationConfig(images=8, batch_size=4),
        trainer=TrainerConfig(progress=False),
        verify=VerifyConfig(latency_runs=3, threads=1, audit=False, min_agreement=None),
        analysis=AnalysisConfig(tensors=5),
    )
    quantize_file.quantize(config)
    found = json.loads((tmp_path / "run" / "report.json").read_text())["analysis"]["comparison"]
    rows = [row for row in found["rows"] if row["kind"] == "activation"]
    assert found["images"] == 5 and found["notes"] == [] and len(rows) > 3
    assert all(row["runtime"]["mse"] == pytest.approx(row["simulated"]["mse"], rel=1e-2) for row in rows)
