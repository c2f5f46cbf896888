"""Tests of runs whose files accept other image sizes: checks and times at these, and a second export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from tiny_run import calibrate_only, report_of, sha256

from qatkit.config.schema import Config, ExportConfig
from qatkit.jobs import export_checkpoint, pipeline
from qatkit_verify.errors import ConfigError


def resizable(folder: Path) -> Config:
    config = replace(calibrate_only(folder), export=ExportConfig(dynamic_axes="auto", bundle=True))
    config.data.image_size = 24
    return config


@pytest.mark.slow
def test_a_run_checks_its_file_at_other_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert pipeline.train(resizable(folder)) == 0
    report = report_of(folder)
    found = report["measured"]["sizes"]
    # The first sizes exceed the example's by at least 128, a pyramid's largest stride; the second ones by 1.
    assert list(found) == ["input 184 (axis 2), 216 (axis 3)", "input 25 (axis 2), 25 (axis 3)"]
    assert all(one["agreement"] == 1 and one["max_steps"] < 1 and one["ratio"] > 0 for one in found.values())
    for name in ("float", "int8"):
        session = ort.InferenceSession(folder / f"model.{name}.onnx")
        assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
        for size in ((24, 24), (17, 40)):
            images = np.random.default_rng(0).normal(size=(2, 3, *size)).astype(np.float32)
            assert session.run(None, {"input": images})[0].shape == (2, 10)
    before = sha256(folder / "model.int8.onnx")
    again = replace(resizable(tmp_path / "again"), checkpoint=str(folder / "last.ckpt"))
    again.export.bundle = False
    assert export_checkpoint.export(again) == 0
    assert sha256(tmp_path / "again" / "model.int8.onnx") == before


def test_a_file_without_free_axes_is_not_asked_at_other_sizes(tmp_path: Path) -> None:
    config = resizable(tmp_path / "run")
    config.model.name = "resizable.Folded"
    assert pipeline.train(config) == 0
    report = report_of(tmp_path / "run")
    assert report["measured"]["sizes"] == {}
    assert [note for note in report["notes"] if "height (24), width (24), because" in note]


def test_a_given_file_keeps_its_axes(tmp_path: Path) -> None:
    config = resizable(tmp_path)
    config.model.name = "onnx/model.onnx"
    with pytest.raises(ConfigError, match=r"export.dynamic_axes=auto: expected none with an ONNX file"):
        pipeline.train(config)
