"""Tests of the warning when a float model with averaged weights is fine-tuned without an average."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import tiny

from qatkit.config.schema import Config
from qatkit.jobs import pipeline
from qatkit.run.float_average import decay_of, warn_of_average

TOLD = r"float\.ckpt: the float weights are an average over steps \(schedule\.ema=0\.9\), .* add schedule\.ema=0\.9"


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the float.ckpt of a run with averaged weights."""
    config = tiny(tmp_path_factory.mktemp("averaged") / "run")
    config.schedule = replace(config.schedule, float_epochs=1, epochs=0, ema=0.9)
    pipeline.train(config)
    return Path(str(config.output_dir)) / "float.ckpt"


def beginning_with(checkpoint: Path, folder: Path, epochs: int = 1, ema: float | None = None) -> Config:
    config = tiny(folder)
    config.model.checkpoint = str(checkpoint)
    config.schedule = replace(config.schedule, float_epochs=0, epochs=epochs, max_steps=2, ema=ema)
    return config


def warned(config: Config) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_average(config)
    return [str(one.message) for one in caught]


def test_a_run_that_leaves_an_average_says_so_once(averaged: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=TOLD) as caught:
        pipeline.train(beginning_with(averaged, tmp_path / "run"))
    assert len([one for one in caught if "an average over steps" in str(one.message)]) == 1


def test_a_run_that_keeps_the_weights_says_nothing(averaged: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.ckpt"
    torch.save({"state_dict": torch.load(averaged, weights_only=True)["state_dict"]}, plain)
    assert warned(beginning_with(averaged, tmp_path))
    assert warned(beginning_with(averaged, tmp_path, epochs=0)) == []
    assert warned(beginning_with(averaged, tmp_path, ema=0.5)) == []
    assert warned(beginning_with(plain, tmp_path)) == []
    chosen = beginning_with(averaged, tmp_path)
    chosen.verify.every = 1
    assert warned(chosen) == []
    assert warned(tiny(tmp_path)) == []


def test_a_checkpoint_of_an_earlier_version_asks_its_run(averaged: Path, tmp_path: Path) -> None:
    stored = torch.load(averaged, weights_only=True)
    assert stored["qatkit"].pop("ema") == 0.9
    torch.save(stored, tmp_path / "float.ckpt")
    assert decay_of(tmp_path / "float.ckpt") is None
    shutil.copy(averaged.with_name("config.yaml"), tmp_path)
    assert decay_of(tmp_path / "float.ckpt") == 0.9
    torch.save(stored | {"finished": False}, tmp_path / "float.ckpt")  # killed: the weights of a step
    assert decay_of(tmp_path / "float.ckpt") is None


def test_a_file_that_is_no_checkpoint_has_no_average(tmp_path: Path) -> None:
    (tmp_path / "float.ckpt").write_bytes(b"no checkpoint")
    assert decay_of(tmp_path / "float.ckpt") is None and decay_of(tmp_path / "nothing.ckpt") is None
