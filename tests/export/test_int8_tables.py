"""Tests of int8 embedding tables in ONNX files: their rows have the values that NumPy computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from qatkit.export import ort_modes

ROWS, COLUMNS = 1000, 32
TABLE = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
TABLE *= np.geomspace(0.01, 10, ROWS, dtype=np.float32)[:, None]
IDS = np.random.default_rng(1).integers(0, ROWS, (3, 7))


def write(path: Path, *, tied: bool = False) -> Path:
    """Writes a file that multiplies looked-up rows by a matrix, which is the transposed table if `tied`."""
    matrix = TABLE[:64].T.copy()
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"], "lookup")]
    if tied:
        nodes.append(helper.make_node("Transpose", ["table"], ["matrix"], "turn", perm=[1, 0]))
    nodes += [
        helper.make_node("MatMul", ["rows", "matrix"], ["product"], "product"),
        helper.make_node("Identity", ["rows"], ["found"], "found"),
    ]
    weights = {"table": TABLE} | ({} if tied else {"matrix": matrix})
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "T"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("found", "product")],
        [numpy_helper.from_array(one, name) for name, one in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


@pytest.mark.parametrize("mode", ["dynamic", "weight_only"])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_have_scales_of_their_own(mode: str, tied: bool, tmp_path: Path) -> None:
    source, target = write(tmp_path / "float.onnx", tied=tied), tmp_path / "int8.onnx"
    assert getattr(ort_modes, mode)(source, target).notes == []
    scale = np.abs(TABLE).max(1, keepdims=True) / np.float32(127)
    wanted = (np.rint(TABLE / scale) * scale)[IDS]
    found, product = ort.InferenceSession(target).run(None, {"ids": IDS})
    exact = ort.InferenceSession(source).run(None, {"ids": IDS})[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert np.abs(product - exact).max() < 0.05 * np.abs(exact).max()
    assert target.stat().st_size < (0.6 if tied else 0.35) * source.stat().st_size
