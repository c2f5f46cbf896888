"""Tests of a regressor of pictures from training to the bundle, against ONNX Runtime and NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from command_line import CONF
from PIL import Image
from tiny_run import report_of
from torch import Tensor, nn

from qatkit.config.compose import compose_config
from qatkit.jobs import pipeline
from qatkit.run.build import data_of
from qatkit_verify.command import main as verify_bundle


class Net(nn.Module):
    """A network of two convolutions, a mean over the picture and a linear head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).mean((2, 3)))
        return found


def pictures(root: Path, count: int = 160) -> Path:
    """Writes pictures of noise around a random colour, each with a target of 40 times its share of red."""
    root.mkdir()
    draw, lines = np.random.default_rng(0), ["file,redness"]
    for number in range(count):
        level = draw.uniform(20, 235, 3)
        pixels = np.clip(draw.normal(level, 15, (16, 16, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / f"{number:03}.png")
        lines.append(f"{number:03}.png,{40 * level[0] / 255:.4f}")
    (root / "targets.csv").write_text("\n".join(lines))
    return root


@pytest.mark.slow
def test_a_regression_goes_from_pictures_to_a_bundle(tmp_path: Path) -> None:
    root = pictures(tmp_path / "pictures")
    config = compose_config(
        CONF,
        [
            "data=pictures_with_values", f"data.root={root}", "data.image_size=16", "data.workers=0",
            "data.batch_size=16", "task=regression", f"model.name={__name__}.Net", "model.num_classes=null",
            f"output_dir={tmp_path / 'run'}", "calibration.images=64", "calibration.batch_size=16",
            "verify.latency_runs=2", "verify.max_drop=0.5", "trainer.progress=false", "schedule.float_epochs=25",
            "schedule.float_lr=0.02", "schedule.optimizer=adamw", "schedule.epochs=1", "schedule.warmup=0",
            "schedule.lr=1e-4", "export.bundle=true",
        ],
    )  # fmt: skip
    assert pipeline.train(config) == 0
    report, data = report_of(tmp_path / "run"), data_of(config)
    outputs = {}
    for name in ("float", "int8"):
        session = ort.InferenceSession(tmp_path / "run" / f"model.{name}.onnx")
        pairs = [(session.run(None, {"input": x.numpy()})[0], y.numpy()) for x, y in data.test_batches()]
        found, targets = (np.concatenate(one).astype(np.float64).ravel() for one in zip(*pairs, strict=True))
        outputs[name] = found
        scores = report["accuracy"][name]
        assert scores["mae"] == pytest.approx(np.abs(found - targets).mean(), rel=1e-4)
        assert scores["rmse"] == pytest.approx(np.sqrt(((found - targets) ** 2).mean()), rel=1e-4)
        assert scores["mae"] < 3  # a constant answer, the mean, is off by 8
    shift = report["measured"]["bias"]["outputs"][0]
    assert shift["name"] == "" and len(shift["ranges"]) == 5
    assert shift["shift"] == pytest.approx((outputs["int8"] - outputs["float"]).mean(), abs=1e-4)
    spread = np.asarray(data.splits.train.targets).std()
    same = np.abs(outputs["int8"] - outputs["float"]) <= 0.05 * spread
    assert report["fidelity"]["int8"]["agreement"] == pytest.approx(same.mean())
    assert "Shift against float" in (tmp_path / "run" / "report.html").read_text()
    assert verify_bundle([str(tmp_path / "run" / "bundle"), "--min-speedup", "0.01"]) == 0
