"""Tests of a run with number formats, from training to the bundle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_run import BUNDLE, digits_test, logits, report_of, tiny, top

from qatkit.config.schema import BackendConfig
from qatkit.jobs import pipeline

BACKEND = BackendConfig(
    target="qatkit.quant.backends.SIMULATED", weight_dtype="mxfp4", activation_dtype="mxfp8_e4m3"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run that was fine-tuned with MXFP4 weights and MXFP8 activations."""
    folder = tmp_path_factory.mktemp("formats") / "run"
    assert pipeline.train(tiny(folder, backend=BACKEND)) == 0
    return folder


def test_the_bundle_is_whole(run: Path) -> None:
    assert {path.name for path in run.iterdir()} >= BUNDLE


def test_the_report_says_that_it_is_a_simulation(run: Path) -> None:
    report = report_of(run)
    assert report["label"] == "simulated MXFP4 x MXFP8_E4M3"
    assert report["shortfalls"] == []
    assert any(
        "3 activations and the weights have simulated number formats" in one for one in report["notes"]
    )
    assert "simulated MXFP4 x MXFP8_E4M3, ONNX Runtime" in (run / "report.html").read_text()
    ranges = json.loads((run / "ranges.json").read_text())
    assert "mxfp8_e4m3" in str(ranges)


def test_the_file_has_the_accuracy_of_the_simulation(run: Path) -> None:
    images, labels = digits_test()
    found = top(logits(run / "model.int8.onnx", images), labels, 1)
    accuracy = report_of(run)["accuracy"]
    assert found == pytest.approx(accuracy["int8"]["top1"])
    assert found == pytest.approx(accuracy["simulated"]["top1"], abs=0.6)  # two of 360 images
    assert accuracy["float"]["top1"] - found < 5


def test_the_weights_have_the_size_of_their_format(run: Path) -> None:
    int8, exact = (onnx.load(run / f"model.{kind}.onnx").graph.initializer for kind in ("int8", "float"))
    weights = sum(np.prod(one.dims) for one in exact if len(one.dims) > 1)
    codes = sum(np.prod(one.dims) for one in int8 if one.name.endswith("codes"))
    assert codes == weights / 2  # two codes of 4 bits per byte


def test_the_file_computes_by_its_own_function(run: Path) -> None:
    model = onnx.load(run / "model.int8.onnx")
    assert [(one.domain, one.name) for one in model.functions] == [("qatkit", "mxfp8_e4m3")]
    assert sum(node.op_type == "mxfp8_e4m3" for node in model.graph.node) == 3
    assert model.opset_import[0].version == 13
