"""Tests of runs with several algorithms: the report, and equal files from export, resume and cached ranges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from qatkit.algorithms import Equalize
from qatkit.config.schema import (
    CalibrationConfig,
    Config,
    DataConfig,
    ModelConfig,
    ScheduleConfig,
    TrainerConfig,
    VerifyConfig,
)
from qatkit.jobs import export_checkpoint, pipeline
from qatkit.train.module import QATModule


class Net(nn.Module):
    """A net of three convs, a ReLU6, a ReLU and a classifier; one channel of the second conv is dead."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.clip = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU6()
        self.conv2, self.conv3 = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, num_classes)
        nn.init.zeros_(self.conv2.weight[4])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(self.clip(self.conv1(x))))
        return cast(Tensor, self.fc(self.pool(self.conv3(x)).flatten(1)))


def _config(folder: Path, algorithm: dict[str, Any]) -> Config:
    return Config(
        name="corrected",
        output_dir=str(folder),
        model=ModelConfig(name=f"{__name__}.Net"),
        data=DataConfig(image_size=8, batch_size=32, workers=0, test_images=100),
        calibration=CalibrationConfig(images=64),
        algorithm=algorithm,
        schedule=ScheduleConfig(epochs=0),
        trainer=TrainerConfig(accelerator="cpu", progress=False),
        verify=VerifyConfig(latency_runs=3, threads=1, max_drop=None, min_agreement=None),
    )


def test_a_corrected_run_reports_resumes_and_exports_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    algorithm = {
        "equalize": {"target": "qatkit.algorithms.Equalize", "relu6": "relu"},
        "bias_correction": {"target": "qatkit.algorithms.BiasCorrection", "method": "empirical"},
    }
    config = _config(folder, algorithm)
    assert pipeline.train(config) == 0
    skipped = [tuple(line) for line in json.loads((folder / "report.json").read_text())["skipped"]]
    assert (
        "conv2",
        "dead channels: all weights are zero in 1 of 8 output channels (constant outputs)",
    ) in skipped
    assert (
        "conv2",
        "the scale of 1 channel was raised so that the bias fits int32; no output changes",
    ) in skipped

    uncorrected = QATModule(Net(), torch.zeros(2, 3, 8, 8), algorithms=[Equalize(relu6="relu")])
    stored = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    for name, value in uncorrected.graph.named_parameters():
        assert torch.equal(stored[f"graph.{name}"], value) == name.endswith("weight")
    made = (folder / "model.int8.onnx").read_bytes()

    again = tmp_path / "again"
    exported = replace(config, checkpoint=str(folder / "last.ckpt"), output_dir=str(again))
    assert export_checkpoint.export(exported) == 0
    assert (again / "model.int8.onnx").read_bytes() == made

    # Resumed after calibration: the corrections are in the checkpoint and must not be applied twice.
    for name in ("report.json", "report.html", "model.int8.onnx"):
        (folder / name).unlink()
    assert pipeline.train(replace(config, resume=str(folder / "last.ckpt"), output_dir=None)) == 0
    assert (folder / "model.int8.onnx").read_bytes() == made


class Normed(nn.Module):
    """A net on 16 patches per image: LayerNorm with two outlier channels, hidden layer, classifier."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.hidden, self.fc = nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, num_classes)
        scale = torch.ones(12)
        scale[[2, 7]] = 70.0
        with torch.no_grad():
            self.norm.weight.mul_(scale)
            self.hidden.weight.div_(scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(2, 3).permute(0, 2, 1, 3, 4).flatten(2)
        return cast(Tensor, self.fc(torch.relu(self.hidden(self.norm(x))).mean(1)))


def test_smoothing_is_part_of_cached_ranges_and_the_checkpoint(tmp_path: Path) -> None:
    algorithm = {
        "moment_rounding": {"target": "qatkit.algorithms.MomentRounding"},
        "smooth_quant": {"target": "qatkit.algorithms.SmoothQuant", "strength": 1.0},
    }
    folder, cache = tmp_path / "run", tmp_path / "ranges.safetensors"
    config = _config(folder, algorithm)
    config.model.name = f"{__name__}.Normed"
    config.calibration.cache = str(cache)
    assert pipeline.train(config) == 0
    report = json.loads((folder / "report.json").read_text())
    assert ["hidden", "not smoothed: mean (mean) does not scale channel by channel"] not in report["skipped"]
    ranges = json.loads((folder / "ranges.json").read_text())
    assert (
        max(entry["high"] for site, entry in ranges.items() if "norm" in site) < 70
    )  # the outlier channels were 70 times wider
    made = (folder / "model.int8.onnx").read_bytes()

    # Another run finds the ranges of the smoothed model in the cache.
    assert pipeline.train(replace(config, output_dir=str(tmp_path / "cached"))) == 0
    assert (tmp_path / "cached" / "model.int8.onnx").read_bytes() == made

    for name in ("report.json", "report.html", "model.int8.onnx"):
        (folder / name).unlink()
    assert pipeline.train(replace(config, resume=str(folder / "last.ckpt"), output_dir=None)) == 0
    assert (folder / "model.int8.onnx").read_bytes() == made
    assert json.loads((folder / "report.json").read_text())["skipped"] == report["skipped"]
