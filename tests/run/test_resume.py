"""Tests of resuming with other settings: allowed changes are noted, others are refused at the start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tiny_run import Net, report_of, sha256, tiny

from qatkit.config.schema import BackendConfig, Config, ScheduleConfig
from qatkit.jobs import pipeline
from qatkit.run.resume import MAY_CHANGE
from qatkit_verify.errors import ConfigError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumable") / "run"
    assert pipeline.train(tiny(folder)) == 0
    return folder


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """Returns a copy of the finished run without its report, as if it had been killed before writing that."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "report.json").unlink()
    return folder


def going_on(folder: Path) -> Config:
    return replace(tiny(folder), resume=str(folder / "last.ckpt"))


def _set(path: str, value: object) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        group, _, key = path.rpartition(".")
        setattr(getattr(config, group) if group else config, key, value)

    return change


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schedule.lr", 0.5),
        ("schedule.epochs", 2),
        ("seed", 1),
        ("backend", BackendConfig("qatkit.quant.backends.QNNPACK")),
        ("data.batch_size", 16),
        ("calibration.images", 32),
        ("model.name", "resnet18"),
        ("export.opset", 17),
        ("algorithm", {"equalize": {"target": "qatkit.algorithms.Equalize"}}),
        ("trainer.precision", "bf16-mixed"),
        ("verify.every", 1),
        ("verify.held_out", 50),
        ("verify.validation", True),
        ("schedule.ema", 0.9),
    ],
)
def test_what_decides_weights_or_the_file_is_refused(key: str, value: object, stopped: Path) -> None:
    config, before = going_on(stopped), sha256(stopped / "last.ckpt")
    _set(key, value)(config)
    with pytest.raises(ConfigError, match=f"resume=.*{key}") as error:
        pipeline.train(config)
    assert "there, " in str(error.value) and "only these may change: " in str(error.value)
    assert sha256(stopped / "last.ckpt") == before and not (stopped / "report.json").exists()


def test_another_folder_is_refused(stopped: Path, tmp_path: Path) -> None:
    config = replace(going_on(stopped), output_dir=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"output_dir=.*since a run continues in its own folder"):
        pipeline.train(config)
    assert not (tmp_path / "other").exists()


def _digits_folder(root: Path, brighter: int = 0) -> str:
    """Writes 120 digits as files (90 for training), one of them brighter by `brighter`; returns `root`."""
    bunch = load_digits()
    for index in range(120):
        pixels = np.round(bunch.images[index] * 15).astype(np.uint8)
        pixels += np.uint8(brighter if index == 40 else 0)
        folder = root / ("train" if index < 90 else "test") / str(bunch.target[index])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{index:03}.png")
    return str(root)


def test_a_run_resumes_with_moved_images_but_not_with_others(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = tiny(folder)
    config.data.source = "qatkit.data.image_folder"
    config.data.mean, config.data.std = [0.5] * 3, [0.5] * 3
    config.data.root = _digits_folder(tmp_path / "there")
    config.schedule.float_epochs, config.verify.max_drop = 1, None
    assert pipeline.train(config) == 0
    (folder / "report.json").unlink()
    before = sha256(folder / "last.ckpt")
    config = replace(config, resume=str(folder / "last.ckpt"))
    config.data.root = _digits_folder(tmp_path / "changed", brighter=1)
    with pytest.raises(
        ConfigError,
        match=r"data\.root=.*changed: expected the same training data, .* began with .resume=null",
    ):
        pipeline.train(config)
    assert sha256(folder / "last.ckpt") == before and not (folder / "report.json").exists()
    config.data.root = _digits_folder(tmp_path / "elsewhere")
    assert pipeline.train(config) == 0


def test_a_run_goes_on_with_the_float_models_that_it_began_with(finished: Path, tmp_path: Path) -> None:
    """The float models' files may move but not change: they teach, and accuracy is compared with them."""
    folder, mine, teacher = tmp_path / "run", tmp_path / "mine.ckpt", tmp_path / "teacher.ckpt"
    for file in (mine, teacher):
        shutil.copy(finished / "float.ckpt", file)
    schedule = ScheduleConfig(epochs=1, max_steps=6, lr=1e-3, distill=0.5, distill_checkpoint=str(teacher))
    config = tiny(folder, schedule=schedule)
    config.model.checkpoint = str(mine)
    assert pipeline.train(config) == 0
    before = sha256(folder / "model.int8.onnx")
    (folder / "report.json").unlink()
    config = replace(config, resume=str(folder / "last.ckpt"))
    for key, file in (("model.checkpoint", mine), ("schedule.distill_checkpoint", teacher)):
        torch.save(Net().state_dict(), file)
        with pytest.raises(
            ConfigError, match=rf"^{key}=.*: expected the weights that the run in .* began with"
        ):
            pipeline.train(config)
        shutil.copy(finished / "float.ckpt", file)
    config.model.checkpoint = None
    with pytest.raises(ConfigError, match=r"^model\.checkpoint=null: expected the weights that the run in"):
        pipeline.train(config)
    config.model.checkpoint = str(mine.rename(tmp_path / "moved.ckpt"))
    assert pipeline.train(config) == 0
    assert sha256(folder / "model.int8.onnx") == before


def test_what_may_change_is_taken_and_told(stopped: Path, finished: Path) -> None:
    config = going_on(stopped)
    config.verify.max_drop, config.verify.latency_runs = 40.0, 4
    assert pipeline.train(config) == 0
    note = report_of(stopped)["notes"][0]
    assert note.startswith("resumed from last.ckpt; changed since: ")
    assert "verify.max_drop 5.0 → 40.0" in note and "verify.latency_runs 3 → 4" in note
    assert sha256(stopped / "model.int8.onnx") == sha256(finished / "model.int8.onnx")
    assert report_of(finished)["notes"] == [
        one for one in report_of(stopped)["notes"] if "resumed" not in one
    ]


def test_every_key_of_the_table_is_a_setting() -> None:
    for key in MAY_CHANGE:
        value: object = Config()
        for part in key.split("."):
            assert is_dataclass(value) and part in {one.name for one in fields(value)}, key
            value = getattr(value, part)
