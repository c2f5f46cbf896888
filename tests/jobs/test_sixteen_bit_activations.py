"""Tests of a whole run with 16-bit activations, whose operators run in float, as the report says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from tiny_run import digits_test, logits, report_of, tiny, top

from qatkit.config.rules import validate
from qatkit.config.schema import BackendConfig, Config
from qatkit.jobs import pipeline
from qatkit_verify.errors import ConfigError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of an audited run with float training and QAT with learned scales."""
    folder = tmp_path_factory.mktemp("sixteen") / "run"
    config = tiny(folder, backend=BackendConfig(activation_dtype="uint16", weight_dtype="int4"))
    config.quantizer.activation = "qatkit.quant.learned.lsq.LSQFakeQuantize"
    config.quantizer.weight = "qatkit.quant.learned.lsq.LSQWeightFakeQuantize"
    config.export.bundle, config.verify.audit = False, True
    assert pipeline.train(config) == 0
    return folder


def test_the_file_is_as_accurate_as_reported(finished: Path) -> None:
    images, labels = digits_test()
    reported = report_of(finished)
    found = top(logits(finished / "model.int8.onnx", images), labels, 1)
    assert reported["accuracy"]["int8"]["top1"] == pytest.approx(found, abs=1e-9)
    assert found > reported["accuracy"]["float"]["top1"] - 5
    assert reported["parity"]["optimized"]["max_steps"] < 0.1
    nodes = onnx.load(finished / "model.int8.onnx").graph.node
    assert {n.domain for n in nodes if n.op_type == "QuantizeLinear"} == {"com.microsoft"}


def test_the_report_says_it_computes_in_float(finished: Path) -> None:
    reported = report_of(finished)
    assert reported["label"] == "W4A16"
    audit = reported["audit"]
    assert audit["int8_macs"] == 0 < audit["macs"] and not audit["problems"]
    kinds = {n["precision"]: n["reason"] for n in audit["nodes"] if n["op"] in ("Conv", "Gemm", "FusedConv")}
    assert (
        list(kinds) == ["float"] and "16-bit values, which ONNX Runtime computes in float" in kinds["float"]
    )
    assert any("activations with 16 bits" in note for note in reported["notes"])
    page = (finished / "report.html").read_text()
    assert "W4A16, ONNX Runtime" in page


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"placement": "measured"},
            "placement=measured: expected fixed with backend.activation_dtype=uint16",
        ),
        ({"precision": "auto"}, "precision.search=auto: expected none with backend.activation_dtype=uint16"),
        ({"io": "uint8"}, "export.io=uint8: expected float32 with backend.activation_dtype=uint16"),
    ],
)
def test_choices_by_the_clock_are_refused(settings: dict[str, Any], message: str) -> None:
    config = replace(Config(), backend=BackendConfig(activation_dtype="uint16"))
    config.placement = settings.get("placement", "fixed")
    config.precision.search = settings.get("precision", "none")
    config.export.io = settings.get("io", "float32")
    with pytest.raises(ConfigError) as refused:
        validate(config)
    assert str(refused.value) == message
