"""Tests of a user's task in one file: a regression runs through train.py to the report with its own metric.

The reported figures are computed again from the files, with NumPy and ONNX Runtime.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from angle_task import LARGEST, load
from command_line import run_script
from numpy.typing import NDArray

from qatkit.compare.find import runs_below
from qatkit.records.comparison import MET

SETTINGS = (
    "task=angle_task.Angle", "data.source=angle_task.load", "model.name=angle_task.Net", "model.num_classes=null",
    "data.augment=none", "data.image_size=8",
    "data.batch_size=64", "data.workers=0", "calibration.images=64", "schedule.float_epochs=6",
    "schedule.float_lr=3e-3", "schedule.lr=1e-4", "schedule.optimizer=adamw", "schedule.distill=0.5",
    "trainer.accelerator=cpu", "trainer.progress=false", "verify.latency_runs=3", "verify.threads=1",
    "verify.max_drop=2", "verify.min_agreement=0.95", "verify.audit=false", "seed=3",
)  # fmt: skip


def _run(folder: Path, *settings: str) -> str:
    done = run_script("train.py", *SETTINGS, *settings, f"output_dir={folder}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def _error(file: Path) -> float:
    """Returns a file's mean absolute error on the test images, in degrees."""
    test = load(None, False, 3).test
    pixels = np.stack([np.asarray(test[index][0]) for index in range(len(test))])
    images: NDArray[np.float32] = ((pixels / 255 - 0.5) / 0.5).astype(np.float32)
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": images})
    return float(np.abs(LARGEST * found[:, 0].astype(np.float64) - np.asarray(test.targets)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ptq", "qat"])
def test_a_regression_goes_from_one_file_to_the_report(tmp_path: Path, how: str) -> None:
    epochs = {"ptq": 0, "qat": 2}[how]
    printed = _run(tmp_path / "run", f"schedule.epochs={epochs}")

    assert "MAE degrees" in printed and "same angle within 20 degrees" in printed
    assert not any(word in printed.lower() for word in ("top-1", "top-5", "logits", " kl "))
    report: dict[str, Any] = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["task"]["metrics"] == [{"name": "MAE", "unit": "degrees", "higher_is_better": False}]
    for name in ("float", "int8"):
        said = report["accuracy"][name]["mae"]
        assert said == pytest.approx(_error(tmp_path / "run" / f"model.{name}.onnx"), abs=0.05)
        assert f"{said:.2f}" in printed
        assert said < 20  # a constant 0 has an error of 30 degrees
    assert report["shortfalls"] == [] and report["fidelity"]["int8"]["kl"] is None
    if epochs:
        assert list(report["curves"][-1]["epochs"][0])[:3] == ["epoch", "step", "mae"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "MAE degrees" in page and "top-1" not in page
    (row,) = runs_below(tmp_path)
    assert row.state == MET and row.drop == pytest.approx(
        report["accuracy"]["int8"]["mae"] - report["accuracy"]["float"]["mae"]
    )
