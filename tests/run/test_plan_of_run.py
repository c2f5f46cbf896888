"""Tests of the estimated time of each stage: results stay the same; only what is left counts on resume."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import report_of, sha256, tiny

from qatkit.config.argv import one_of_many
from qatkit.config.schema import AnalysisConfig, Config, ScheduleConfig
from qatkit.jobs import pipeline
from qatkit.jobs.pipeline import STAGES
from qatkit.jobs.prepare import Announce
from qatkit.jobs.stages import begin, carry_out
from qatkit.run.folder import Run
from qatkit.run.pace import Pace, Unknown
from qatkit.run.plan import announce, stage
from qatkit.run.timing import undisturbed
from qatkit.train.module import QATModule


def short(folder: Path, **changes: Any) -> Config:
    """Returns the config of a run with float training and QAT, each epoch followed by a validation."""
    return tiny(folder, schedule=ScheduleConfig(epochs=2, float_epochs=1, lr=1e-3, max_steps=20), **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned") / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline.train(short(folder))
    return folder


def test_measuring_leaves_no_trace_in_the_results(finished: Path, tmp_path: Path) -> None:
    unannounced = [one for one in STAGES if not isinstance(one, Announce)]
    assert len(unannounced) == len(STAGES) - 1
    with pipeline.begun(short(tmp_path / "run")) as (run, data, model):
        carry_out(unannounced, begin(run, data, model, QATModule))
    assert report_of(tmp_path / "run")["plan"] == []
    for name in ("model.int8.onnx", "ranges.json"):
        assert sha256(tmp_path / "run" / name) == sha256(finished / name), name
    for name in ("float.ckpt", "last.ckpt"):  # their bytes differ, since they contain the run's path
        mine, other = (torch.load(one / name, weights_only=True) for one in (tmp_path / "run", finished))
        assert torch.equal(mine["rng_state"], other["rng_state"])
        assert (mine["DataModule"], mine.get("curve")) == (other["DataModule"], other.get("curve"))
        assert mine["state_dict"].keys() == other["state_dict"].keys()
        assert all(torch.equal(value, other["state_dict"][key]) for key, value in mine["state_dict"].items())


def test_the_report_has_estimated_and_measured_seconds(finished: Path) -> None:
    report = report_of(finished)
    plan = {row["stage"]: row for row in report["plan"]}
    assert list(plan) == ["float_training", "calibration", "QAT", "export", "verify"]
    for name, row in plan.items():
        assert row["estimate"] > 0 and row["seconds"] == report["timings"][name] and not row["done"]
    assert plan["QAT"]["about"] == "2 epochs, 20 steps of 32 images"
    assert (
        f'time: verify</td><td class="left">{plan["verify"]["seconds"]:.1f} s, estimated'
        in (finished / "report.html").read_text()
    )


def test_a_resumed_run_estimates_only_what_is_left(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = AnalysisConfig(sensitivity="exact", images=40)
    config = replace(short(finished), resume=str(finished / "last.ckpt"), analysis=asked)
    pipeline.train(config)
    plan = {row["stage"]: row for row in report_of(finished)["plan"]}
    done = ["float_training", "calibration", "QAT"]
    assert [name for name, row in plan.items() if row["done"]] == done
    assert [name for name, row in plan.items() if row["estimate"]] == ["export", "analysis", "verify"]
    said = capfd.readouterr().err.splitlines()
    (training,) = [line for line in said if line.startswith("  float training")]
    assert training.endswith(" done")


def test_one_of_many_runs_is_not_announced_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(short(tmp_path / "run"), tmp_path / "run")
    rows = [stage("verify", "every check", lambda: 3.0)]
    with one_of_many():
        announce(run, rows)
    assert capfd.readouterr().err == "" and run.plan == tuple(rows)
    announce(run, rows)
    assert "  verify  every check   3.0 s" in capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("crowded", [False, True])
def test_the_title_says_if_estimates_are_rough(
    crowded: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    announce(Run(short(tmp_path / "run"), tmp_path / "run"), [stage("verify", "", "")], crowded=crowded)
    assert ("rough" in capfd.readouterr().err) == crowded


def test_random_numbers_go_on_after_a_measurement() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = drawn()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    with undisturbed():
        drawn()
    assert drawn() == expected


class _Fails(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise OSError("no such kernel")


def test_a_stage_that_cannot_be_timed_says_so(tmp_path: Path) -> None:
    config = short(tmp_path / "run")
    with pipeline.begun(config) as (_, data, _):
        pace = Pace(config, data, _Fails(), None, {})
        row = stage("float_training", "1 epoch", lambda: pace.float_step.each)
        assert (row.estimate, row.why) == (None, "the model could not be timed")
        with pytest.raises(Unknown, match="no module"):
            _ = pace.simulated
