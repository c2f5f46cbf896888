"""Tests of verify.decision: train.py compares what the float and the quantized file of a detector decide."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from command_line import ROOT, run_script
from onnx import helper
from onnx_models import FLOAT, Array, save
from torchvision.ops import batched_nms, box_iou

from qatkit.config.compose import compose_config


def _detector(path: Path) -> Path:
    """Writes a detector from [n, 3, 16, 16] to scores [n, 64, 3] and boxes [n, 64, 4] for 8 x 8 cells."""
    draw = np.random.default_rng(3)
    y, x = np.mgrid[:8, :8]
    low = np.stack([x, y], -1).reshape(1, 64, 2) * 8.0
    constants: dict[str, Array] = {
        "w": draw.normal(0, 0.3, (16, 3, 3, 3)).astype(np.float32),
        "v": draw.normal(0, 0.5, (7, 16, 1, 1)).astype(np.float32),
        "rows": np.array([0, 7, 64], np.int64),
        "low": low.astype(np.float32),
        "high": (low + 16).astype(np.float32),
        "cut": np.array([3, 2, 2], np.int64),
    }
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["a"], "/stem/Conv", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["r"], "/stem/Relu"),
        helper.make_node("Conv", ["r", "v"], ["h"], "/head/Conv"),
        helper.make_node("Reshape", ["h", "rows"], ["f"], "/head/Reshape"),
        helper.make_node("Transpose", ["f"], ["t"], "/head/Transpose", perm=[0, 2, 1]),
        helper.make_node("Split", ["t", "cut"], ["logits", "p", "q"], "/head/Split", axis=2),
        helper.make_node("Sigmoid", ["logits"], ["scores"], "/scores/Sigmoid"),
        helper.make_node("Add", ["p", "low"], ["first"], "/boxes/Low"),
        helper.make_node("Add", ["q", "high"], ["second"], "/boxes/High"),
        helper.make_node("Concat", ["first", "second"], ["boxes"], "/boxes/Concat", axis=2),
    ]
    return save(path, nodes, {"image": (FLOAT, ["n", 3, 16, 16])}, ["scores", "boxes"], constants)


def _f1(float_file: Path, int8_file: Path, images: Array, least: float) -> float:
    """Returns the F1 score between both files' boxes with scores above `least`, after torchvision's NMS."""
    found, matched, count = [], 0, 0
    for file in (float_file, int8_file):
        scores, boxes = map(
            torch.from_numpy, ort.InferenceSession(str(file)).run(["scores", "boxes"], {"image": images})
        )
        left = []
        for by_class, corners in zip(scores, boxes, strict=True):
            best, classes = by_class.max(1)
            kept = best > least
            order = batched_nms(corners[kept], best[kept], classes[kept], 0.45)
            left.append((corners[kept][order], classes[kept][order]))
        found.append(left)
    for (exact, classes), (others, kinds) in zip(*found, strict=True):
        near, free = box_iou(others, exact), set(range(len(exact)))
        for row, kind in zip(near, kinds, strict=True):
            able = [one for one in free if classes[one] == kind and row[one] >= 0.5]
            if able:
                free.remove(max(able, key=lambda one: float(row[one])))
                matched += 1
        count += len(exact) + len(others)
    return 2 * matched / count


def _trained(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    file, root = _detector(folder / "detector.onnx"), folder / "data"
    root.mkdir()
    images = np.random.default_rng(1).normal(size=(96, 3, 16, 16)).astype(np.float32)
    np.savez(root / "all.npz", image=images)
    command = ["train.py", f"onnx={file}", f"data.root={root}", "data.workers=0",
               f"output_dir={folder / 'run'}", "calibration.batch_size=8", "verify.latency_runs=3",
               "verify.threads=1", "trainer.progress=false", "trainer.accelerator=cpu", "verify.audit=false",
               "verify.min_float_agreement=0", "verify.min_float_sqnr=-100", *settings]  # fmt: skip
    return run_script(*command)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("onnx_ptq", ("calibration=auto",)),
        pytest.param("onnx_qat", ("schedule.epochs=2", "verify.every=1"), marks=pytest.mark.slow),
    ],
)
def test_a_run_judges_a_detector_by_its_boxes(recipe: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    done = _trained(tmp_path, f"recipe={recipe}", "verify.decision=boxes(score=0.7,iou=0.5)", *settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = tmp_path / "run"
    report = json.loads((run / "report.json").read_text())
    images = np.load(tmp_path / "data" / "all.npz")["image"][1::2]
    near = report["fidelity"]["int8"]
    assert near["images"] == len(images)
    wanted = _f1(tmp_path / "detector.onnx", run / "model.int8.onnx", images, 0.7)
    assert 0.5 < wanted < 1 and near["agreement"] == pytest.approx(wanted)
    assert f"same boxes (F1 at IoU 0.5) {100 * wanted:.2f} %" in done.stdout
    assert "same values within a step 1" in done.stdout


def test_no_boxes_are_a_note(tmp_path: Path) -> None:
    done = _trained(
        tmp_path, "recipe=onnx_ptq", "verify.decision=boxes(score=1)", "calibration=moving_average"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    notes = json.loads((tmp_path / "run" / "report.json").read_text())["notes"]
    (note,) = [one for one in notes if "boxes" in one]
    assert "says nothing about these 48 samples, since no box has a score above 1" in note


def test_a_decision_that_does_not_fit_ends_before_calibration(tmp_path: Path) -> None:
    done = _trained(tmp_path, "recipe=onnx_ptq", "verify.decision=strings(7)")
    (line,) = [one for one in done.stderr.splitlines() if "verify.decision" in one]
    assert done.returncode == 2 and "calibrating" not in done.stderr
    assert (
        "expected a blank from 0 to 2" in line
        and "'boxes' [2, 64, 4] for a batch of 2, which suits argmax(AXIS)" in line
    )


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("boxes(score=0.4,iou=0.6)", "boxes(score=0.4,iou=0.6)"),
        ("argmax(-1)", "argmax(-1)"),
        ("'argmax(-1)'", "argmax(-1)"),
        ("cosine", "cosine"),
    ],
)
def test_a_decision_with_arguments_is_typed_as_it_is(typed: str, read: str) -> None:
    config = compose_config(ROOT / "conf", [f"verify.decision={typed}"])
    assert config.verify.decision == read
