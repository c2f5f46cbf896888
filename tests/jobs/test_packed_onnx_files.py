"""Tests of float ONNX files whose weights are packed to few bits: what the command chooses and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from command_line import CONF
from onnx import TensorProto
from test_quantize_any_file import drawn, node, samples, save, several
from tiny_run import report_of

from qatkit.cli.export_command import export_run
from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.config.schema.model import DRAWN
from qatkit.export.accuracy_level import level_of
from qatkit.jobs import quantize_file
from qatkit.verify.accuracy_levels import LevelFigures
from qatkit_verify.bundle.manifest import read_manifest
from qatkit_verify.errors import ConfigError

FILE = "model.weight_only.onnx"


def asked(path: Path, *typed: str) -> Config:
    """Returns the configuration that the command line makes of the keys `typed`, for a quick run."""
    quick = ("verify.latency_runs=3", "verify.threads=1", "trainer.progress=false")
    return compose_config(CONF, [f"onnx={path}", "mode=weight_only", *quick, *typed], adapt=export_run)


def kinds(path: Path) -> set[str]:
    return {one.op_type for one in onnx.load(str(path)).graph.node}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run with data and a bundle, at accuracy level 4."""
    folder = tmp_path_factory.mktemp("packed")
    path, given = several(folder / "net.onnx")
    data = ("data=arrays", f"data.root={samples(folder / 'data', given)}", "data.workers=0")
    weights = ("weights={bits: 4, block: 16}", "export.accuracy_level=4", "export.bundle=true",
               "export.golden_images=2")  # fmt: skip
    bounds = ("verify.min_float_sqnr=5", "verify.min_float_agreement=null")
    config = asked(path, *data, *weights, *bounds, f"output_dir={folder / 'run'}")
    assert config.algorithm == {"gptq": {"target": "qatkit.algorithms.GPTQ"}}
    assert quantize_file.quantize(config) == 0
    return folder / "run"


def test_given_file_is_edited(finished: Path) -> None:
    given, written = (onnx.load(str(finished / name)) for name in ("model.float.onnx", FILE))
    assert [one.name for one in written.graph.input] == [one.name for one in given.graph.input]
    packed = {one.name for one in written.graph.node if one.op_type == "MatMulNBits"}
    assert packed == {"/projected/Gemm", "/features/MatMul"}
    assert "QuantizeLinear" not in kinds(finished / FILE)
    table = [one for one in written.graph.initializer if one.name == "table_quantized"]
    assert [one.data_type for one in table] == [TensorProto.UINT8]


def test_report_and_manifest_have_the_level_and_its_cost(finished: Path) -> None:
    reported = report_of(finished)
    found = reported["measured"]["accuracy_level"]
    assert level_of(finished / FILE) == found["level"] == 4
    assert 0 <= found["changed"] <= 1 and found["ratio"] >= found["ratio_low"] > 0 and found["sqnr_db"] > 20
    assert any(note.startswith("export.accuracy_level=4; on ") for note in reported["notes"])
    manifest = read_manifest(finished / "bundle")
    assert manifest.accuracy_level == json.loads(json.dumps(found))
    assert manifest.session_options == reported["session_options"]


def test_parity_is_that_of_level_0(finished: Path) -> None:
    reported = report_of(finished)
    assert reported["label"] == "INT4 weights"
    assert reported["parity"]["optimized"]["max_steps"] < 0.01
    assert reported["fidelity"]["int8"]["sqnr_db"] < reported["fidelity"]["simulated"]["sqnr_db"] + 3


def test_without_data_nothing_is_claimed(tmp_path: Path) -> None:
    path, _ = several(tmp_path / "net.onnx")
    weights = ("weights={bits: 2, block: per_channel, symmetric: true}", "export.accuracy_level=auto")
    config = asked(path, *weights, "data.count=8", f"output_dir={tmp_path / 'run'}")
    assert (config.data.source, config.algorithm, config.calibration.images) == (DRAWN, {}, 8)
    assert config.verify.min_float_agreement is None and config.verify.min_float_sqnr is None
    assert quantize_file.quantize(config) == 0
    reported = report_of(tmp_path / "run")
    assert reported["measured"]["accuracy_level"] == {"level": 0, "asked": "auto"}
    assert any("the data were drawn at random" in note for note in reported["notes"])
    node = next(one for one in onnx.load(str(tmp_path / "run" / FILE)).graph.node if one.domain)
    assert {one.name: one.i for one in node.attribute}["bits"] == 2 and len(node.input) == 3


def test_products_become_standard_operators(tmp_path: Path) -> None:
    path, folder = narrow(tmp_path / "net.onnx"), tmp_path / "run"
    typed = ("weights={bits: 4, block: 16}", "export.packed_weights=dequantize_linear", "export.bundle=true")

    assert quantize_file.quantize(asked(path, *typed, f"output_dir={folder}")) == 0

    written = onnx.load(folder / FILE)
    assert {one.domain for one in written.opset_import} == {""}
    assert written.opset_import[0].version == 21 > onnx.load(path).opset_import[0].version
    assert {"DequantizeLinear", "MatMul"} <= kinds(folder / FILE)
    reported = report_of(folder)
    assert reported["parity"]["optimized"]["max_steps"] < 0.01
    # 1,160 integers of 4 bits, plus a scale of 4 bytes and a zero point of 4 bits for each of 95 blocks.
    assert reported["audit"]["packed_bits"] == pytest.approx(4 + 95 * 36 / 1160, abs=0.01)
    assert any("has opset 21" in note for note in reported["notes"])
    entries = json.loads((folder / "bundle" / "manifest.json").read_text())["session_options"]
    assert entries == {"session.qdq_matmulnbits_accuracy_level": "0"}


def test_scales_are_held_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    path, folder = narrow(tmp_path / "net.onnx"), tmp_path / "run"
    typed = ("weights={bits: 4, block: 16, scale_dtype: uint8}", f"output_dir={folder}")
    assert quantize_file.quantize(asked(path, *typed)) == 0
    assert {"MatMulNBits", "Cast", "Mul"} <= kinds(folder / FILE)
    # Padded blocks of integers, 1 byte for each of 95 scales, 4 bytes for the unit of each of 45 outputs, and
    # zero points.
    held = (40 * 16 + 5 * 24) + 95 + 45 * 4 + (40 * 1 + 5 * 2)
    assert report_of(folder)["audit"]["packed_bits"] == pytest.approx(8 * held / 1160, abs=0.01)


def test_without_bits_the_tools_write_int8(tmp_path: Path) -> None:
    path, _ = several(tmp_path / "net.onnx")
    config = asked(path, "data=arrays", f"data.root={tmp_path}")
    assert config.weights.bits is None and config.algorithm == {}
    assert config.data.source == "qatkit.data.arrays.arrays"


def no_weight(path: Path) -> Path:
    nodes = [node("Relu", "x", "a"), node("Softmax", "a", "out")]
    return save(path, nodes, {"x": (TensorProto.FLOAT, ["n", 8])}, {"out": TensorProto.FLOAT}, {})


def narrow(path: Path) -> Path:
    nodes = [node("MatMul", "x a", "h"), node("Relu", "h", "r"), node("MatMul", "r b", "out")]
    weights: dict[str, Any] = {"a": drawn(24, 40), "b": drawn(40, 5)}
    return save(path, nodes, {"x": (TensorProto.FLOAT, ["n", 24])}, {"out": TensorProto.FLOAT}, weights)


MISTAKES = {
    "bits": (
        narrow,
        ["weights.bits=5"],
        r"weights.bits=5: expected one of 2, 3, 4, 8 \(ONNX Runtime's MatMulNBits",
    ),
    "block": (
        narrow,
        ["weights={bits: 4, block: 48}"],
        "weights.block=48: expected one of 16, 32, 64, 128, 256, per_",
    ),
    "no bits": (
        narrow,
        ["weights.block=32"],
        "weights.block=32: the number of bits is missing; add weights.bits=4",
    ),
    "backend": (
        narrow,
        ["weights.bits=4", "backend=fbgemm"],
        "backend=fbgemm: the key cannot be set with onnx=FILE",
    ),
    "long block": (
        narrow,
        ["weights={bits: 4, block: 64}"],
        "weights.block=64: expected at most 32, or per_channel; the widest weight, '/out/MatMul', has 40 inputs per",
    ),
    "level": (
        narrow,
        ["weights.bits=4", "export.packed_weights=dequantize_linear", "export.accuracy_level=auto"],
        "export.accuracy_level=auto: expected 0 with export.packed_weights=dequantize_linear, where the session",
    ),
    "form": (
        narrow,
        ["export.packed_weights=dequantize_linear"],
        "export.packed_weights=dequantize_linear: ",
    ),
    "no weight": (no_weight, ["weights.bits=4"], "onnx=.*: the model has no Conv, Linear, .* that could"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_is_one_line_before_anything_is_written(case: str, tmp_path: Path) -> None:
    build, typed, message = MISTAKES[case]
    path = build(tmp_path / "net.onnx")
    with pytest.raises(ConfigError) as raised:
        quantize_file.quantize(asked(path, *typed, f"output_dir={tmp_path / 'run'}"))
    assert re.match(message, str(raised.value))
    assert not (tmp_path / "run").exists()


def test_weights_belong_to_their_mode(tmp_path: Path) -> None:
    path = narrow(tmp_path / "net.onnx")
    with pytest.raises(
        ConfigError, match=r"weights.bits=4: expected null without onnx=FILE mode=weight_only"
    ):
        compose_config(CONF, [f"onnx={path}", "mode=static", "weights.bits=4"], adapt=export_run)


FIGURES = {
    "fast and the same": (LevelFigures(64, 2.0, 1.5, 0.0, 46.0, None), True),
    "no faster": (LevelFigures(64, 1.1, 1.0, 0.0, 46.0, None), False),
    "other decisions": (LevelFigures(64, 2.0, 1.5, 0.03, 30.0, None), False),
    "labels decide": (LevelFigures(64, 2.0, 1.5, 0.03, 30.0, (80.0, 79.9, 0.1)), True),
    "a worse metric": (LevelFigures(64, 2.0, 1.5, 0.0, 30.0, (80.0, 79.0, 1.0)), False),
}


@pytest.mark.parametrize("case", FIGURES)
def test_level_4_pays_where_it_is_faster_and_costs_little(case: str) -> None:
    figures, pays = FIGURES[case]
    assert figures.pays is pays
