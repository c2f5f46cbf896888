"""Tests of verify.validation: epochs and file are measured on held-out images, the file also on test images."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import calibrate_only, digits_test, logits, report_of, tiny, top

from qatkit.config.schema import Config, ScheduleConfig
from qatkit.data import DataModule, digits
from qatkit.jobs import pipeline
from qatkit.run.build import data_of
from qatkit_verify.errors import ConfigError


def _joined(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = (torch.cat(parts).numpy() for parts in zip(*batches, strict=True))
    return images, labels


def test_the_file_and_each_epoch_are_measured_on_held_out_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path / "run", schedule=ScheduleConfig(epochs=2, float_epochs=2, lr=1e-3))
    config.verify.validation, config.verify.max_drop = True, None
    assert pipeline.train(config) == 0
    data, report = data_of(config), report_of(tmp_path / "run")
    images, labels = _joined(data.held_out_batches())
    test_images, test_labels = _joined(data.test_batches())
    assert len(images) == 1437 // 5
    found, files = report["measured"]["validation"], {"int8": "model.int8.onnx", "float": "model.float.onnx"}
    outputs = {row: logits(tmp_path / "run" / name, images) for row, name in files.items()}
    for row, scores in outputs.items():
        assert found["accuracy"][row]["top1"] == pytest.approx(top(scores, labels, 1))
        of_test = top(logits(tmp_path / "run" / files[row], test_images), test_labels, 1)
        assert report["accuracy"][row]["top1"] == pytest.approx(of_test)
    same = outputs["int8"].argmax(1) == outputs["float"].argmax(1)
    noise = np.square(outputs["int8"].astype(float) - outputs["float"]).sum()
    decibel = 10 * np.log10(np.square(outputs["float"].astype(float)).sum() / noise)
    near = found["fidelity"]["int8"]
    assert near["agreement"] == pytest.approx(same.mean()) and near["sqnr_db"] == pytest.approx(decibel)
    curves = {one["stage"]: one for one in report["curves"]}
    assert [(one["held_out"], one["chosen"], one["images"]) for one in curves.values()] == [
        (True, False, 287)
    ] * 2
    printed = capsys.readouterr().out
    assert (
        f"on 287 held-out training images: float top-1 {found['accuracy']['float']['top1']:.2f}, " in printed
    )
    assert "epochs of QAT, top-1 of the training model on 287 held-out training images (the last" in printed


def test_validation_uses_test_images_or_held_out_ones_on_request(
    tmp_path: Path,
) -> None:
    config = tiny(tmp_path)
    for validation, wanted in ((False, digits_test()[0]), (True, None)):
        config.verify.validation = validation
        data = data_of(config)
        given = torch.cat([images for images, _ in data.val_dataloader()]).numpy()
        assert np.allclose(
            given, _joined(data.held_out_batches())[0] if wanted is None else wanted, atol=1e-6
        )
        assert data.validation_count == len(given)


@pytest.mark.parametrize(("images", "count"), [(1400, 280), (7, 1), (1437, 287)])
def test_a_fifth_is_held_out_where_nothing_is_asked_for(images: int, count: int) -> None:
    config = Config()
    config.data.image_size, config.data.train_images = 8, images
    data = DataModule(config.data, digits, 0, held_out=None)
    assert len(data.held_out) == count and len(data._train) == images - count


def test_more_than_there_is_is_refused(tmp_path: Path) -> None:
    config = calibrate_only(tmp_path / "run")
    config.verify.validation, config.verify.held_out = True, 1437
    with pytest.raises(
        ConfigError,
        match=r"verify\.held_out=1437: expected a number below 1437, the number of training images",
    ):
        pipeline.train(config)
