"""Tests with a third-party library of custom operators, onnxruntime-extensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from clean_nets import drawn, save

from qatkit.config.schema import CleanConfig, Config
from qatkit.jobs.quantize_file import quantize

# NegPos, an operator of the library, returns the negative and the positive part of a tensor.
NET = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.contrib" : 1]> net (float[b, 8] x) => (float[b, 8] y) {
  a = MatMul (x, w)  below, above = ai.onnx.contrib.NegPos (a)
  same = Identity (below)  d = Sub (above, same)  y = MatMul (d, w)
}"""


@pytest.fixture
def library() -> str:
    extensions = pytest.importorskip(
        "onnxruntime_extensions", reason="no onnxruntime-extensions is installed"
    )
    return str(extensions.get_library_path())


def test_a_file_with_custom_operators_is_cleaned(library: str, tmp_path: Path) -> None:
    source = save(tmp_path / "net.onnx", NET, {"w": drawn(8, 8)})
    asked = CleanConfig(custom_ops=[library], rewrite=["relu"])
    assert (
        quantize(Config(onnx=f"{source}", mode="clean", clean=asked, output_dir=f"{tmp_path / 'out'}")) == 0
    )
    written = tmp_path / "out" / "model.clean.onnx"
    kinds = [node.op_type for node in onnx.load(written).graph.node]
    assert kinds == ["MatMul", "NegPos", "Sub", "MatMul"]
    options, x = ort.SessionOptions(), drawn(3, 8, seed=1)
    options.register_custom_ops_library(library)
    (ours,) = ort.InferenceSession(str(written), options).run(None, {"x": x})
    np.testing.assert_allclose(ours, np.abs(x @ drawn(8, 8)) @ drawn(8, 8), rtol=1e-4, atol=1e-5)
