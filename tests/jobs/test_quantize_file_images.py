"""Tests of float ONNX files whose image size, layout and preprocessing differ from those of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import float_files
import numpy as np
import pytest
from float_files import by_hand, made, settings
from onnx import helper
from PIL import Image

from qatkit.config.schema import DataConfig
from qatkit.jobs import quantize_file


def _channels_last(path: Path) -> Path:
    """Writes a file of Transpose, Conv, ReLU, global pool, Flatten and Gemm with an input [N, 6, 12, 3]."""
    nodes = [
        helper.make_node("Transpose", ["input"], ["x"], "first", perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["y"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc"], ["output"], "fc", transB=1),
    ]
    draw = np.random.default_rng(0)
    weights = {"w": draw.normal(size=(16, 3, 3, 3)), "fc": draw.normal(size=(10, 16))}
    return by_hand(path, shape=["N", 6, 12, 3], nodes=nodes, weights=weights)


def _letterboxed() -> Any:
    """Returns the test digits resized by Pillow to 6 x 6, centred in 6 x 12, with three equal channels."""
    found = []
    for image in np.rint((float_files.digits()[2][:, 0] * 0.5 + 0.5) * 255).astype(np.uint8):
        canvas = Image.new("L", (12, 6), 114)
        canvas.paste(Image.fromarray(image).resize((6, 6), Image.Resampling.BILINEAR), (3, 0))
        found.append(np.repeat(np.asarray(canvas, np.float32)[..., None], 3, axis=2))
    return np.stack(found)


@pytest.mark.parametrize("mode", ["dynamic", "float16", "weight_only", "static"])
def test_a_file_takes_oblong_images_with_channels_last(mode: str, tmp_path: Path) -> None:
    path, folder = _channels_last(tmp_path / "file.onnx"), tmp_path / "run"
    data = DataConfig(workers=0, layout="nhwc", fit="letterbox", channels="bgr", pixels="0..255")
    config = settings(path, mode, folder, data=data)
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0

    report = json.loads((folder / "report.json").read_text())
    images, labels = _letterboxed(), float_files.digits()[3]
    exact = float_files.logits(folder / "model.float.onnx", images)
    entries = report["session_options"]
    found = float_files.logits(folder / made(mode), images, entries=entries)
    assert report["accuracy"]["float"]["top1"] == pytest.approx(
        100 * (exact.argmax(1) == labels).mean(), abs=1
    )
    assert np.abs(found - exact).max() < 0.05 * np.ptp(exact)
    if mode != "static":
        near = np.abs(found - exact).max()
        assert report["parity"]["against_float"]["max_abs"] == pytest.approx(near, rel=0.2, abs=1e-2)
    told = json.loads((folder / "model.json").read_text())["preprocessing"]
    assert (told["image_size"], told["layout"], told["fit"], told["channel_order"], told["pixels"]) == (
        [6, 12], "NHWC", "letterbox", "BGR", "0..255",
    )  # fmt: skip


def test_a_file_beside_its_model_json_is_prepared_as_that_says(tmp_path: Path) -> None:
    """Checks that a run's float file, quantized again without data settings, is preprocessed the same."""
    data = DataConfig(workers=0, layout="nhwc", fit="letterbox", channels="bgr", pixels="0..255")
    first = settings(_channels_last(tmp_path / "file.onnx"), "dynamic", tmp_path / "first", data=data)
    first.verify.max_drop = None
    assert quantize_file.quantize(first) == 0
    again = settings(
        tmp_path / "first" / "model.float.onnx", "static", tmp_path / "again", data=DataConfig(workers=0)
    )
    again.verify.max_drop = None
    assert quantize_file.quantize(again) == 0
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("first", "again")]
    assert reports[0]["preprocessing"] == reports[1]["preprocessing"]
    assert reports[0]["accuracy"]["float"] == reports[1]["accuracy"]["float"] and reports[1]["notes"] == []
