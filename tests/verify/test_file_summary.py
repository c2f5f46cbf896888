"""Tests of `export.py onnx=FILE mode=summary`: operators, their types and bytes, and what ran in int8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from clean_nets import Arrays, drawn, save

from qatkit.config.schema import Config
from qatkit.jobs.quantize_file import quantize

HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
QDQ = f"""{HEAD} net (float[batch, 3, 8, 8] x) => (float[batch, 5] y) {{
  q = QuantizeLinear (x, s, z)
  d = DequantizeLinear (q, s, z)
  v = DequantizeLinear <axis = 0> (w, t, o)
  c = Conv (d, v)
  r = Relu (c)
  p = QuantizeLinear (r, s, n)
  e = DequantizeLinear (p, s, n)
  g = GlobalAveragePool (e)
  h = QuantizeLinear (g, s, n)
  i = DequantizeLinear (h, s, n)
  f = Flatten (i)
  y = MatMul (f, m)
}}"""


Summary = Callable[[Path], tuple[dict[str, Any], str]]


@pytest.fixture
def summary(capsys: pytest.CaptureFixture[str]) -> Summary:
    def summarized(net: Path) -> tuple[dict[str, Any], str]:
        assert quantize(Config(onnx=f"{net}", mode="summary", output_dir=f"{net.parent / 'out'}")) == 0
        return json.loads((net.parent / "out" / "summary.json").read_text()), capsys.readouterr().out

    return summarized


def held() -> Arrays:
    weight = np.random.default_rng(0).integers(-64, 64, (4, 3, 3, 3)).astype(np.int8)
    scales: Arrays = {
        "s": np.asarray(0.05, np.float32),
        "z": np.asarray(128, np.uint8),
        "n": np.asarray(0, np.uint8),
    }
    return scales | {
        "t": np.full(4, 0.01, np.float32),
        "o": np.zeros(4, np.int8),
        "w": weight,
        "m": drawn(4, 5),
    }


def test_a_quantized_file_in_a_table(summary: Summary, tmp_path: Path) -> None:
    told, printed = summary(save(tmp_path / "net.onnx", QDQ, held()))
    rows = {row["operator"]: row for row in told["rows"]}
    assert rows["Conv"]["types"] == {"uint8 x int8 per channel": 1}
    assert rows["Conv"]["ran"] == {"int8": 1}
    assert rows["Conv"]["weight_bytes"] == 4 * 3 * 9 + 4 * 4 + 4  # with scales and zero points
    assert rows["MatMul"] | {"ran": None} == {"operator": "MatMul", "count": 1, "quantized": 0, "types": {},
                                             "weight_bytes": 80, "ran": None, "inner": 0}  # fmt: skip
    assert rows["MatMul"]["ran"] == {"float": 1}
    assert told["nodes"] == 12
    assert told["weight_bytes"] == sum(one.nbytes for one in held().values())
    conv = next(line for line in printed.splitlines() if line.startswith("Conv"))
    assert conv.split()[1:5] == ["1", "1", "1", "int8"]


@pytest.mark.parametrize(
    ("nodes", "weights", "operator", "types"),
    [
        (
            "d = DequantizeLinear <axis = 0, block_size = 16> (w, s, z)\n y = MatMul (x, d)",
            {"w": "int4", "s": (2, 8), "z": "int4"},
            "MatMul",
            "int4 in blocks of 16",
        ),
        (
            "q, s, z = DynamicQuantizeLinear (x)\n i = MatMulInteger (q, w, z)\n"
            " f = Cast <to = 1> (i)\n y = Mul (f, s)",
            {"w": "int8"},
            "MatMulInteger",
            "dynamic uint8 x int8",
        ),
    ],
    ids=["int4", "dynamic"],
)
def test_types_of_other_forms(
    nodes: str, weights: dict[str, Any], operator: str, types: str, summary: Summary, tmp_path: Path
) -> None:
    draw, arrays = np.random.default_rng(0), {}
    for name, kind in weights.items():
        if isinstance(kind, tuple):
            arrays[name] = np.full(kind, 0.1, np.float32)
        else:
            shape = (2, 8) if name == "z" else (32, 8)
            arrays[name] = draw.integers(-7, 8, shape).astype(ml_dtypes.int4 if kind == "int4" else kind)
    net = save(tmp_path / "net.onnx", f"{HEAD} net (float[3, 32] x) => (float[3, 8] y) {{ {nodes} }}", arrays)
    told, _ = summary(net)
    rows = {row["operator"]: row for row in told["rows"]}
    assert rows[operator]["types"] == {types: 1}


def test_a_file_that_does_not_run_here_is_counted_all_the_same(summary: Summary, tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17, "own" : 1]> n (float[2] x) => (float[2] y) { y = own.thing (x) }'
    told, printed = summary(save(tmp_path / "net.onnx", text))
    assert told["rows"][0] == {"operator": "own::thing", "count": 1, "quantized": 0, "types": {}, "weight_bytes": 0,
                               "ran": None, "inner": 0}  # fmt: skip
    assert "the file does not run here" in printed
