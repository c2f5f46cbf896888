"""Tests of the shift that an NPU needs (`broken_pairs`) for a weight with a Transpose before its reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from clean_nets import Arrays, save

from qatkit.verify.graph_view import read_model
from qatkit.verify.npu_pairs import broken_pairs

# Only the weight's type and scale vary; the scale is 2^-position.
_TURNED = """<ir_version: 10, opset_import: ["" : 21]> net (float[2, 4] x) => (float[2, 3] y) {
  q = QuantizeLinear (x, s, z)  d = DequantizeLinear (q, s, z)  v = DequantizeLinear (w, t, n)
  u = Transpose <perm: ints = [1, 0]> (v)  m = MatMul (d, u)  c = DequantizeLinear (b, t, n)
  r = QuantizeLinear (m, s, z)  e = DequantizeLinear (r, s, z)  y = Add (e, c)
}"""


@pytest.mark.parametrize(
    ("dtype", "position", "lines"), [(np.int8, 6, 0), (np.int8, 20, 1), (np.int16, 20, 0)]
)
def test_a_transposed_weight_has_its_shift(
    dtype: type[np.generic], position: int, lines: int, tmp_path: Path
) -> None:
    step, zero = np.array(2.0**-4, np.float32), np.array(0, np.int8)
    weights: Arrays = {
        "s": step, "z": zero, "t": np.array(2.0**-position, np.float32), "n": np.array(0, dtype),
        "w": np.ones((3, 4), dtype), "b": np.ones(3, dtype),
    }  # fmt: skip
    file = save(tmp_path / "turned.onnx", _TURNED, weights)
    onnx.checker.check_model(file, full_check=True)
    found = broken_pairs(read_model(file).graph)
    assert len(found) == lines
    assert all(
        line.startswith("MatMul ") and line.endswith("its shift is 20; the hardware supports 0 to 16")
        for line in found
    )
