"""Tests of `export.mode` and `export.io` from the configuration to the bundle, and of early refusals."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tiny_run import Net, digits_test, report_of, sha256, tiny
from torch import Tensor

from qatkit.config.rules import validate
from qatkit.config.schema import (
    BackendConfig,
    CalibrationConfig,
    Config,
    ExportConfig,
    ModelConfig,
    OverrideConfig,
    ScheduleConfig,
    VerifyConfig,
)
from qatkit.data import Splits
from qatkit.data.sources import digits
from qatkit.jobs import export_checkpoint, pipeline
from qatkit_verify.errors import ConfigError

MODES = ("dynamic", "float16", "weight_only")
FLOAT_ONLY = ScheduleConfig(epochs=0, float_epochs=4)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_makes_its_file_from_the_trained_float_model(mode: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert pipeline.train(tiny(folder, schedule=FLOAT_ONLY, export=ExportConfig(mode=mode))) == 0

    made = f"model.{mode}.onnx"
    files = {
        made,
        "model.float.onnx",
        "model.json",
        "report.json",
        "report.html",
        "config.yaml",
        "float.ckpt",
    }
    assert set(os.listdir(folder)) == files
    report = json.loads((folder / "report.json").read_text())
    images, labels = digits_test()
    exact = ort.InferenceSession(folder / "model.float.onnx").run(None, {"input": images})[0]
    found = ort.InferenceSession(folder / made).run(None, {"input": images})[0]
    np.testing.assert_allclose(found, exact, atol=0.03 * np.ptp(exact))
    assert report["accuracy"]["float"]["top1"] == pytest.approx(100 * (exact.argmax(1) == labels).mean())
    assert set(report["accuracy"]) == {"float", "int8"}
    assert report["parity"]["reference"] == "the same file without optimizations"
    assert report["config"]["export"]["mode"] == mode and report["shortfalls"] == []
    assert (folder / made).stat().st_size < (folder / "model.float.onnx").stat().st_size


@pytest.mark.parametrize("backend", ["FBGEMM", pytest.param("QNNPACK", marks=pytest.mark.slow)])
def test_a_run_with_integer_ends_verifies_its_integers(backend: str, tmp_path: Path) -> None:
    target = BackendConfig(target=f"qatkit.quant.backends.{backend}")
    config = tiny(tmp_path, export=ExportConfig(io="uint8"), backend=target)
    config.verify.audit = backend == "FBGEMM"  # x86 lacks int8 x int8 kernels for some operators
    assert pipeline.train(config) == 0

    report, told = (json.loads((tmp_path / name).read_text()) for name in ("report.json", "model.json"))
    session = ort.InferenceSession(tmp_path / "model.int8.onnx")
    kind = {"FBGEMM": "uint8", "QNNPACK": "int8"}[backend]
    assert session.get_inputs()[0].type == "tensor(uint8)"
    assert session.get_outputs()[0].type == f"tensor({kind})" and told["output"]["dtype"] == kind
    images, labels = digits_test()
    pixels = np.rint((images * 0.5 + 0.5) * 255).astype(np.uint8)
    logits = session.run(None, {"input": pixels})[0].astype(np.float32) - told["output"]["zero_point"]
    top1 = 100 * (logits.argmax(1) == labels).mean()
    assert report["accuracy"]["int8"]["top1"] == pytest.approx(top1, abs=0.6)  # threads affect near-ties
    assert report["parity"]["optimized"]["max_steps"] <= 2
    assert ".astype(np.uint8)" in (tmp_path / "report.html").read_text()

    again = replace(config, checkpoint=str(tmp_path / "last.ckpt"), output_dir=str(tmp_path / "again"))
    assert export_checkpoint.export(again) == 0
    same = (tmp_path / "again" / "model.int8.onnx").read_bytes()
    assert same == (tmp_path / "model.int8.onnx").read_bytes()


def _config(export: ExportConfig, **changes: Any) -> Config:
    return replace(Config(export=export, schedule=ScheduleConfig(epochs=0)), **changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(ExportConfig(mode="int4")), r"export\.mode=int4: "
         r"expected one of dynamic, static, float16, weight_only"),
        (_config(ExportConfig(io="int8")), r"export\.io=int8: expected one of float32, uint8"),
        (_config(ExportConfig(mode="dynamic"), schedule=ScheduleConfig(epochs=1)),
         r"schedule\.epochs=1: expected 0 with export\.mode=dynamic"),
        (_config(ExportConfig(mode="float16", io="uint8")), r"export\.io=uint8: "
         r"expected float32 with export\.mode=float16"),
        (_config(ExportConfig(mode="float16"), verify=VerifyConfig(control=True)),
         r"verify\.control=true: expected false with export\.mode"),
        (_config(ExportConfig(mode="dynamic"), backend=BackendConfig(overrides={"fc": OverrideConfig(float=True)})),
         r"backend\.overrides=\{fc: .*\}: expected \{\} with export\.mode=dynamic"),
        (_config(ExportConfig(mode="weight_only"), backend=BackendConfig(reduce_range=True)),
         r"backend\.reduce_range=true: expected false with export\.mode=weight_only"),
        (_config(ExportConfig(mode="dynamic"), calibration=CalibrationConfig(random=True)),
         r"calibration\.random=true: expected false with export\.mode=dynamic"),
        (_config(ExportConfig(mode="dynamic"), onnx="m.onnx", mode="static"), r"export\.mode=dynamic: expected static"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_impossible_integer_io_fails_before_anything_is_written(tmp_path: Path) -> None:
    export = ExportConfig(io="uint8")
    tensorrt = BackendConfig(target="qatkit.quant.backends.TENSORRT")
    with pytest.raises(ConfigError, match=r"export\.io=uint8: expected float32 with backend=tensorrt"):
        pipeline.train(tiny(tmp_path / "a", export=export, backend=tensorrt))
    part = BackendConfig(overrides={"conv1": OverrideConfig(float=True)})
    with pytest.raises(
        ConfigError,
        match=r"export\.io=uint8: expected float32, because Conv reads the model's input in float",
    ):
        pipeline.train(tiny(tmp_path / "b", export=export, backend=part))
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_has_no_other_mode(tmp_path: Path) -> None:
    config = _config(ExportConfig(mode="dynamic"), checkpoint=str(tmp_path / "last.ckpt"))
    with pytest.raises(
        ConfigError, match=r"export\.mode=dynamic: expected static, since a checkpoint is exported as QDQ"
    ):
        export_checkpoint.export(config)


@pytest.mark.parametrize("images", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_fixed_batch_is_that_of_the_latency(images: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = tiny(folder, export=ExportConfig(dynamic_batch=False))
    config.verify.latency_batch = images
    assert pipeline.train(config) == 0
    for name in ("int8", "float"):
        shape = onnx.load(str(folder / f"model.{name}.onnx")).graph.input[0].type.tensor_type.shape
        assert [size.dim_value for size in shape.dim] == [images, 3, 8, 8]
    found = report_of(folder)
    assert found["fixed_batch"] == images and found["accuracy"]["int8"]["images"] == 360


class OfOneImage(Net):
    """A model whose graph fixes the batch at one image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(1, 3, 8, 8))


def test_a_model_of_a_fixed_batch_has_a_mode(tmp_path: Path) -> None:
    export = ExportConfig(mode="dynamic", dynamic_batch=False)
    config = tiny(tmp_path / "run", schedule=ScheduleConfig(epochs=0), export=export)
    config.model, config.verify.max_drop = ModelConfig(name=f"{__name__}.OfOneImage"), None
    assert pipeline.train(config) == 0


def bicubic(root: str | None, download: bool, seed: int) -> Splits:
    """Returns the digits with bicubic interpolation as their preprocessing."""
    splits = digits(root, download, seed)
    assert splits.default_preprocessing is not None
    return replace(
        splits, default_preprocessing=replace(splits.default_preprocessing, interpolation="bicubic")
    )


def test_the_report_enlarges_images_as_the_data_do(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", schedule=ScheduleConfig(epochs=0))
    config.verify.max_drop = None
    config.data = replace(config.data, source=f"{__name__}.bicubic", image_size=None)
    pipeline.train(config)
    prepared = json.loads((tmp_path / "run" / "model.json").read_text())["preprocessing"]
    assert (
        prepared["interpolation"]
        == report_of(tmp_path / "run")["preprocessing"]["interpolation"]
        == "bicubic"
    )
    assert "Resampling.BICUBIC" in (tmp_path / "run" / "report.html").read_text()


def test_integer_io_from_a_checkpoint_needs_a_separate_folder(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    run = tiny(folder)
    assert pipeline.train(run) == 0
    before = sha256(folder / "model.int8.onnx")
    again = replace(run, checkpoint=str(folder / "last.ckpt"), export=ExportConfig(io="uint8"))

    with pytest.raises(
        ConfigError, match=r"export\.io=uint8: expected float32 in .*run, whose report describes such a file"
    ):
        export_checkpoint.export(again)
    missing = replace(again, output_dir=str(other), data=replace(run.data, image_size=16))
    with pytest.raises(
        ConfigError, match=r"data\.image_size=16: .* trained on images of 3 channels and 8 x 8 pixels"
    ):
        export_checkpoint.export(missing)
    assert sha256(folder / "model.int8.onnx") == before and not other.exists()

    assert export_checkpoint.export(replace(again, output_dir=str(other))) == 0
    about = json.loads((other / "model.json").read_text())
    assert about["input"]["dtype"] == "uint8" and about["output"]["scale"] > 0
    assert set(os.listdir(other)) == {"model.int8.onnx", "model.json"}


def test_what_tensorrt_will_fuse_is_not_said_to_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = tiny(
        folder,
        backend=BackendConfig(target="qatkit.quant.backends.TENSORRT"),
        schedule=ScheduleConfig(epochs=0),
    )
    config.verify.max_drop = None
    pipeline.train(config)
    page = (folder / "report.html").read_text()
    assert "are requested in int8" in page and "Audit of the file" in page
    assert "run in int8" not in page and "dequantized at run time" not in page
