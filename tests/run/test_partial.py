"""Tests that a run killed between algorithms reuses their finished results and makes the same file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_run import calibrate_only

from qatkit.algorithms.base import Algorithm
from qatkit.config.compose import save_config
from qatkit.config.schema import Config
from qatkit.jobs import pipeline
from qatkit.records.run_files import CONFIG_FILE
from qatkit.run.find import find_resume
from qatkit.train.module import QATModule


class Killed(QATModule):
    """A module that is interrupted as soon as an algorithm has finished."""

    def correct(self, batches: Iterable[Any], algorithms: Iterable[Algorithm] | None = None) -> None:
        super().correct(batches, algorithms)
        raise KeyboardInterrupt


def test_resume_auto_finds_a_run_that_has_a_partial_result_alone(tmp_path: Path) -> None:
    config = Config(name="mine", output_dir=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    save_config(config, tmp_path / "run" / CONFIG_FILE)
    assert find_resume(replace(config, resume="auto")) is None
    for age, name in ((50, "adaround.0.partial"), (10, "adaround.1.partial")):
        (tmp_path / "run" / name).touch()
        os.utime(tmp_path / "run" / name, (1e9 - age, 1e9 - age))
    found = find_resume(replace(config, resume="auto"))
    assert found == (tmp_path / "run", tmp_path / "run" / "adaround.1.partial")
    (tmp_path / "run" / "last.ckpt").touch()
    assert find_resume(replace(config, resume="auto")) == (tmp_path / "run", tmp_path / "run" / "last.ckpt")


@pytest.mark.slow  # three runs
def test_a_killed_run_goes_on_with_what_is_finished(tmp_path: Path) -> None:
    settings = {"target": "qatkit.algorithms.AdaRound", "images": 32, "steps": 10}
    made = []
    for name in ("whole", "killed"):
        config = calibrate_only(tmp_path / name)
        config.algorithm = {"adaround": settings}
        partial = tmp_path / name / "adaround.0.partial"
        if name == "killed":
            with pytest.raises(KeyboardInterrupt):
                pipeline.train(config, Killed)
            kept = partial.read_bytes()
            assert not (tmp_path / name / "last.ckpt").exists() and kept
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*its block and all later ones are computed again")
            assert pipeline.train(replace(config, resume="auto" if name == "killed" else None)) == 0
        assert not list((tmp_path / name).glob("*.partial"))
        made.append((tmp_path / name / "model.int8.onnx").read_bytes())
    assert made[0] == made[1]
