"""Tests of the U-Net: logits for images of any size, and a file that is int8 from first to last layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from command_line import CONF
from labelled_pictures import folder
from tiny_run import report_of

from qatkit.config.compose import compose_config
from qatkit.jobs import pipeline
from qatkit.models.unet import UNet
from qatkit_verify.errors import ConfigError


@pytest.mark.parametrize("size", [(32, 48), (37, 51), (16, 100)])
def test_logits_have_the_size_of_the_input(size: tuple[int, int]) -> None:
    with torch.inference_mode():
        assert UNet(7, width=4).eval()(torch.rand(2, 3, *size)).shape == (2, 7, *size)


def test_parameters_are_those_of_the_paper() -> None:
    """Counts the paper's parameters at width 64 (31.0 M).

    BatchNorms replace biases, and 3x3 convolutions after a resize replace the 2x2 up-convolutions.
    """
    widths, wanted, before = [64, 128, 256, 512, 1024], 0, 3
    for width in widths:
        wanted, before = wanted + 9 * width * (before + width) + 4 * width, width
    for below, width in zip(widths[:0:-1], widths[-2::-1], strict=True):
        wanted += 9 * width * (below + 2 * width + width) + 6 * width
    assert sum(one.numel() for one in UNet(2, width=64).parameters()) == wanted + 2 * 64 + 2


def test_images_too_small_for_its_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.image_size=\[8, 40\]: expected at least 16 x 16 pixels"):
        UNet(2, width=4)(torch.zeros(1, 3, 8, 40))
    with pytest.raises(ConfigError, match=r"model.kwargs.width=0"):
        UNet(2, width=0)


def test_its_int8_file_resizes_and_joins_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    root = folder(tmp_path / "pictures", 24, 8, (26, 38))
    asked = (
        "model=unet", "model.num_classes=null", "model.kwargs.width=8", "model.kwargs.levels=3",
        "data=label_pictures", f"data.root={root}", "data.workers=0",
        "data.image_size=[26,38]", "data.ignored=[9]", "data.batch_size=4", "task=segmentation",
        "calibration.images=16",
        "calibration.batch_size=4", "schedule.float_epochs=2", "schedule.float_lr=0.02", "schedule.epochs=0",
        "verify.latency_runs=2", "verify.max_drop=10", "trainer.progress=false", f"output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert pipeline.train(compose_config(CONF, [*asked])) == 0
    report = report_of(tmp_path / "run")
    assert report["shortfalls"] == [] and report["audit"]["int8_share"] == 1.0

    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = ort.InferenceSession(tmp_path / "run" / "model.int8.onnx", options)
    assert session.run(None, {"input": np.zeros((1, 3, 26, 38), np.float32)})[0].shape == (1, 3, 26, 38)
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    given = {name: node.op_type for node in graph.node for name in node.output}
    bytes_of = {"QLinearConv", "MaxPool", "Resize", "QLinearConcat"}
    resized = [given[node.input[0]] for node in graph.node if node.op_type == "Resize"]
    assert len(resized) == 2 and set(resized) <= bytes_of
    assert sum(node.op_type == "QLinearConcat" for node in graph.node) == 2
