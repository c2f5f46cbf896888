"""Tests of a detector from training to the bundle, against ONNX Runtime and torchvision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from boxed_pictures import voc_folder
from tiny_detector import asked
from tiny_run import report_of
from torchvision.ops import batched_nms, box_iou

from qatkit.jobs import export_checkpoint, pipeline
from qatkit.run.build import data_of
from qatkit_verify.command import main as verify_bundle


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the folder of a run with float training and QAT, and the folder of its pictures."""
    top = tmp_path_factory.mktemp("detector")
    root = voc_folder(top / "pictures", 48, 12)
    assert pipeline.train(asked(top / "run", root, "export.bundle=true")) == 0
    return top / "run", root


def test_its_file_finds_the_objects(made: tuple[Path, Path]) -> None:
    run, root = made
    report, data = report_of(run), data_of(asked(run, root))
    assert report["shortfalls"] == [] and report["classes"] == ["brick", "leaf"]
    session, seen, found = ort.InferenceSession(run / "model.int8.onnx"), 0, 0
    for images, targets in data.test_batches():
        boxes, scores = session.run(None, {"input": images.numpy()})
        for picture, truth in enumerate(targets):
            best = scores[picture].argmax(0)  # per class
            for label, *corners, _ in truth.tolist():
                near = box_iou(
                    torch.tensor([corners]), torch.from_numpy(boxes[picture, best[int(label)]])[None]
                )
                seen, found = seen + 1, found + int(near.item() > 0.5)
    assert seen == 24 and found >= 20
    int8, exact = (report["accuracy"][name] for name in ("int8", "float"))
    assert int8["map@0.5"] > 75 and abs(int8["map"] - exact["map"]) < 8 and int8["overlap_of_matches"] > 60
    assert report["fidelity"]["int8"]["agreement"] > 0.85


def test_boxes_stay_float_and_the_rest_is_int8(made: tuple[Path, Path]) -> None:
    report = report_of(made[0])
    assert report["audit"]["problems"] == []
    model = onnx.load(made[0] / "model.int8.onnx")
    assert [one.name for one in model.graph.output] == ["boxes", "scores"]
    assert model.opset_import[0].version == 13


def test_the_report_draws_boxes(made: tuple[Path, Path]) -> None:
    examples = report_of(made[0])["examples"]
    assert [name for name, _ in examples["legend"]] == ["brick", "leaf"]
    for row in examples["rows"]:
        assert [panel["title"] for panel in row["panels"]] == ["truth", "float", "INT8"]
        assert len(row["panels"][0]["shapes"]) == 2
    assert "of the float and INT8 boxes have no match" in (made[0] / "report.html").read_text()


def test_suppression_in_the_file_is_torchvisions(made: tuple[Path, Path]) -> None:
    _check_suppression(*made, "int8", 1e-5)


@pytest.mark.parametrize("mode", ["dynamic", pytest.param("float16", marks=pytest.mark.slow)])
def test_files_of_other_modes_have_suppression(mode: str, made: tuple[Path, Path], tmp_path: Path) -> None:
    run, root = tmp_path / "run", made[1]
    trained = (
        f"model.checkpoint={made[0] / 'float.ckpt'}",
        "schedule.float_epochs=0",
        "schedule.epochs=0",
        "schedule.warmup=0",
    )
    assert pipeline.train(asked(run, root, *trained, f"export.mode={mode}", "export.bundle=true")) == 0
    # With other outputs the graph is optimized differently and float16 rounds elsewhere: by one bit near 1.
    _check_suppression(run, root, mode, 5e-4 if mode == "float16" else 1e-5)
    assert (run / "bundle" / "model.nms.onnx").is_file()
    assert f"model.{mode}.nms.onnx" in [one["name"] for one in report_of(run)["files"]]


def _check_suppression(run: Path, root: Path, name: str, tolerance: float) -> None:
    data = data_of(asked(run, root))
    plain, whole = (ort.InferenceSession(run / f"model.{name}{end}.onnx") for end in ("", ".nms"))
    images, _ = next(iter(data.test_batches()))
    boxes, scores = (torch.from_numpy(one) for one in plain.run(None, {"input": images.numpy()}))
    rows = torch.from_numpy(whole.run(["detections"], {"input": images.numpy()})[0])
    assert rows.shape[1] == 7 and len(rows) > 12
    for picture in range(len(images)):
        places, labels = (scores[picture] > 0.05).nonzero(as_tuple=True)
        values = scores[picture][places, labels]
        kept = batched_nms(boxes[picture][places], values, labels, 0.6)
        found = rows[rows[:, 0] == picture]
        found = found[found[:, 5].argsort(descending=True)]
        torch.testing.assert_close(found[:, 5], values[kept], atol=tolerance, rtol=tolerance)
        # Boxes with equal scores may come in another order.
        near = box_iou(found[:, 1:5], boxes[picture][places[kept]])
        same = (near > 0.99) & (found[:, 6, None].long() == labels[kept])
        assert same.any(0).all() and same.any(1).all()
    measured = report_of(run)["measured"]["detections"]
    assert 2 * measured["matched"] == measured["boxes"] > 24
    onnx.checker.check_model(onnx.load(run / f"model.{name}.nms.onnx"), full_check=True)


def test_a_checkpoint_gives_both_files_again(made: tuple[Path, Path]) -> None:
    run, root = made
    config = replace(
        asked(run, root), checkpoint=str(run / "last.ckpt"), output_dir=str(run.parent / "again")
    )
    assert export_checkpoint.export(config) == 0
    for name in ("model.int8.onnx", "model.int8.nms.onnx"):
        assert (run.parent / "again" / name).read_bytes() == (run / name).read_bytes()


def test_its_bundle_is_checked_without_torch(made: tuple[Path, Path]) -> None:
    bundle = made[0] / "bundle"
    assert verify_bundle([str(bundle), "--min-speedup", "0.01"]) == 0
    assert (bundle / "model.nms.onnx").is_file()
    card = (bundle / "card.md").read_text()
    assert "pipeline_tag: object-detection" in card and "mAP@0.5" in card


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn", "yolox"]
)
def test_detectors_by_name_run(name: str, tmp_path: Path) -> None:
    root = voc_folder(tmp_path / "pictures", 8, 4)
    own = "qatkit.models.detectors.yolox.yolox_nano" if name == "yolox" else name
    changes = (f"model.name={own}", "data.image_size=64", "schedule.float_epochs=1", "verify.max_drop=100")
    config = asked(tmp_path / "run", root, *changes, "verify.audit=false", "verify.min_agreement=0.9")
    assert pipeline.train(config) == 0
    session = ort.InferenceSession(tmp_path / "run" / "model.int8.onnx")
    boxes, scores = session.run(None, {"input": np.zeros((1, 3, 64, 64), np.float32)})
    assert boxes.shape[:2] == scores.shape[:2] and scores.shape[2] == 2


@pytest.mark.slow
def test_two_stages_are_int8(tmp_path: Path) -> None:
    root = voc_folder(tmp_path / "pictures", 48, 12)
    changes = ("data.image_size=64", "model.name=two_stage_net.TinyTwoStages", "export.bundle=true")
    assert pipeline.train(asked(tmp_path / "run", root, *changes, "schedule.distill=0.5")) == 0
    report = report_of(tmp_path / "run")
    assert report["shortfalls"] == [] and report["audit"]["problems"] == []
    assert report["audit"]["int8_macs"] > 0.9 * report["audit"]["macs"]
    measured = report["measured"]["detections"]
    assert 2 * measured["matched"] == measured["boxes"] > 24
    assert verify_bundle([str(tmp_path / "run" / "bundle"), "--min-speedup", "0.01"]) == 0
