"""Tests of an embedder of digits from training to the bundle, against ONNX Runtime and NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from command_line import CONF
from tiny_run import report_of
from torch import Tensor, nn

from qatkit.config.compose import compose_config
from qatkit.jobs import pipeline
from qatkit.run.build import data_of
from qatkit_verify.command import main as verify_bundle


class Net(nn.Module):
    """A network of two convolutions that returns embeddings of 12 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Linear(16 * 16, 12)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x).flatten(1))
        return found


@pytest.mark.slow
def test_an_embedder_goes_from_digits_to_a_bundle(tmp_path: Path) -> None:
    config = compose_config(
        CONF,
        [
            "data=digits", "data.image_size=8", "data.resize=8", "data.mean=[0.5]", "data.std=[0.5]", "data.workers=0",
            "data.augment=none", "data.test_images=200", "task=embedding",
            f"model.name={__name__}.Net", "model.num_classes=null",
            f"output_dir={tmp_path / 'run'}", "calibration.images=64", "verify.latency_runs=2", "verify.max_drop=3",
            "trainer.progress=false", "schedule.float_epochs=4", "schedule.float_lr=0.003", "schedule.optimizer=adamw",
            "schedule.epochs=1", "schedule.warmup=0", "schedule.lr=1e-4", "schedule.distill=0.5", "export.bundle=true",
        ],
    )  # fmt: skip
    assert pipeline.train(config) == 0
    report, data, near = report_of(tmp_path / "run"), data_of(config), []
    for name in ("float", "int8"):
        session = ort.InferenceSession(tmp_path / "run" / f"model.{name}.onnx")
        pairs = [(session.run(None, {"input": x.numpy()})[0], y.numpy()) for x, y in data.test_batches()]
        rows, labels = (np.concatenate(one) for one in zip(*pairs, strict=True))
        rows = rows.astype(np.float64) / np.linalg.norm(rows, axis=1, keepdims=True)
        cosines = rows @ rows.T - 9 * np.eye(len(rows))
        near.append(cosines.argmax(1))
        recall = 100 * (labels[cosines.argmax(1)] == labels).mean()
        assert report["accuracy"][name]["recall@1"] == pytest.approx(recall) and recall > 85
    assert report["fidelity"]["int8"]["agreement"] == pytest.approx((near[0] == near[1]).mean())
    assert report["fidelity"]["int8"]["remark"].startswith("cosine to float 0.9")
    assert "recall@1 %" in (tmp_path / "run" / "report.html").read_text()
    assert verify_bundle([str(tmp_path / "run" / "bundle"), "--min-speedup", "0.01"]) == 0
