"""Tests of accuracy against counts with torch.topk on the logits of a plain ONNX Runtime session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from qdq_graphs import QdqGraph, classifier
from quantized_resnet import Files, quantized_resnet18

from qatkit.records.results import Results
from qatkit.verify.accuracy import accuracy, module_accuracy
from qatkit.verify.checks.accuracy import PAIRED, AccuracyCheck
from qatkit_verify.classification import classified
from qatkit_verify.errors import ConfigError
from qatkit_verify.session import open_session


@pytest.fixture(scope="module")
def resnet18() -> Files:
    return quantized_resnet18()


def _batches(count: int, size: int, channels: int, pixels: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, channels, pixels, pixels, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return list(zip(torch.split(images, size), torch.split(labels, size), strict=True))


@pytest.mark.parametrize("progress", [False, True])
def test_top1_and_top5_of_a_file(resnet18: Files, progress: bool) -> None:
    batches = _batches(23, 8, 3, 64)
    session = ort.InferenceSession(resnet18.float_path)
    hits1 = hits5 = 0
    for images, labels in batches:
        for image, label in zip(images, labels, strict=True):
            logits = torch.as_tensor(session.run(None, {"input": image[None].numpy()})[0])
            best = logits.topk(5).indices[0].tolist()
            hits1 += best[0] == label
            hits5 += int(label) in best
    result = accuracy(open_session(resnet18.float_path, threads=1), batches, progress)
    assert result.images == 23
    assert result.score == pytest.approx(100 * int(hits1) / 23)
    assert result.metrics[1].value == pytest.approx(100 * hits5 / 23)


def test_a_module_and_its_file_score_the_same_and_modes_are_kept(resnet18: Files) -> None:
    batches = _batches(16, 8, 3, 64)
    resnet18.module.train()
    simulated = module_accuracy(resnet18.module, batches)
    assert resnet18.module.training
    resnet18.module.eval()
    assert simulated == accuracy(open_session(resnet18.float_path, threads=1), batches)


def test_few_classes_have_no_top5(tmp_path: Path) -> None:
    classifier(tmp_path / "m.onnx", classes=5)
    batches = [(torch.zeros(2, 16, 8, 8), torch.zeros(2, dtype=torch.long))]
    assert accuracy(open_session(tmp_path / "m.onnx", threads=1), batches).metrics[1].value is None


def test_a_fixed_batch_does_not_change_accuracy(tmp_path: Path) -> None:
    classifier(tmp_path / "fixed.onnx", batch=4)
    classifier(tmp_path / "dynamic.onnx")
    batches = _batches(11, 5, 16, 8)
    fixed, dynamic = (
        accuracy(open_session(tmp_path / name, threads=1), batches) for name in ("fixed.onnx", "dynamic.onnx")
    )
    assert fixed == dynamic
    assert fixed.images == 11


def test_nan_names_the_file_and_the_image(tmp_path: Path) -> None:
    graph = QdqGraph()
    path = graph.save(tmp_path / "log.onnx", graph.node("Log", ["input"], "log"), ("N", 10), 2)
    images = np.ones((4, 10), np.float32)
    images[2, 1] = -1
    with pytest.raises(ConfigError, match=r"log\.onnx: its output for image 6 is NaN or infinite"):
        accuracy(
            open_session(path, threads=1), [(images[:2],) * 1 + (np.zeros(2),)] * 2 + [(images, np.zeros(4))]
        )


def test_no_images_is_an_error(resnet18: Files) -> None:
    with pytest.raises(ConfigError, match=r"data\.test_images=0"):
        accuracy(open_session(resnet18.float_path, threads=1), [])


@pytest.mark.parametrize(("right", "told"), [((8, 15, 7), True), ((12, 20, 9), True), ((45, 60, 48), False)])
def test_a_float_model_at_chance_is_reported(right: tuple[int, ...], told: bool) -> None:
    images = (50, 80, 60)
    scores = classified(100 * sum(right) / sum(images), 100.0, sum(images), images, right)
    lines = AccuracyCheck().lines(Results("run", "m", "out", accuracy={"float": scores, "int8": scores}))

    assert (
        any("not measurably better than one answer for all images (42.11 %)" in line for line in lines)
        == told
    )


@pytest.mark.parametrize(
    ("lost", "change"), [(0.0, "+0.00"), (0.001, "+0.00"), (-0.25, "+0.25"), (0.25, "-0.25")]
)
def test_a_change_of_nothing_has_no_minus(lost: float, change: str) -> None:
    results = Results("run", "m", "out").with_measured(PAIRED, {"lost": lost, "interval": 0.2})
    (line,) = AccuracyCheck().lines(results)

    assert f"top-1 against float: {change} points" in line
