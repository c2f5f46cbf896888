"""Tests of a sweep's final table, the requirements of launchers, and the resuming of restarted runs."""

from __future__ import annotations

import json
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import Launch, no_job
from hydra.core.hydra_config import HydraConfig
from tiny_run import tiny

from qatkit.cli import slurm
from qatkit.config.schema import Config
from qatkit.run.find import going_on
from qatkit_verify.errors import ConfigError


def test_a_sweep_ends_with_a_table_of_its_runs(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row has the run's status and the keys that differ. The exit status is the highest of all runs."""

    def job(config: Config) -> int:
        if config.seed == 2:
            raise ConfigError("seed", 2, "another")
        return config.seed

    assert launch(job, "-m", "seed=0,1,2", "schedule.epochs=3") == 2
    said = capsys.readouterr().out.splitlines()
    assert "sweep of 3 runs" in said
    rows = [re.split(r"  +", line.strip()) for line in said if line.startswith("seed=")]
    assert [row[0] for row in rows] == ["seed=0", "seed=1", "seed=2"]  # without the keys that all runs share
    assert [row[4] for row in rows] == ["done", "falls short", "failed: seed=2: expected another"]
    folders = [row[-1] for row in rows]
    assert all(folder.startswith("outputs/quickstart/") for folder in folders[:2]) and len(set(folders)) == 3
    assert folders[2] == "-"  # refused before it got a folder


def test_a_defect_in_one_run_keeps_the_table(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    def job(config: Config) -> int:
        if config.seed == 1:
            raise RuntimeError("a defect")
        return 0

    with pytest.raises(RuntimeError, match="a defect"):
        launch(job, "-m", "seed=0,1,2")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed=")]
    assert len(rows) == 3 and "failed: a defect" in rows[1] and "done" in rows[2]


@pytest.mark.slow
def test_sweeps_begun_in_one_second_have_a_folder_each(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that exists, even an empty one, may belong to another sweep.

    The configuration that the nodes of a cluster receive must contain the name of the new folder.
    """
    clock = SimpleNamespace(now=lambda: SimpleNamespace(strftime=lambda pattern: "now"))
    monkeypatch.setattr("hydra.core.utils.datetime", clock)  # used by Hydra's resolver `now`
    Path("multirun/now_2").mkdir(parents=True)
    swept, nodes = set[str](), list[bytes]()

    def job(config: Config) -> int:
        swept.add(HydraConfig.get().sweep.dir)
        nodes.append(pickle.dumps(HydraConfig.instance().cfg))
        return 0

    for seeds in ("0,1", "2,3", "4,5"):
        assert launch(job, "-m", f"seed={seeds}") == 0
    assert swept == {"multirun/now", "multirun/now_3", "multirun/now_4"}
    for place, seeds in (("now", "0,1"), ("now_3", "2,3"), ("now_4", "4,5")):
        found = json.loads(Path("multirun", place, "sweep.json").read_text())
        assert found["typed"] == [f"seed={seeds}"] and len(found["runs"]) == 2
    assert not list(Path("multirun/now_2").iterdir())
    assert pickle.loads(nodes[-1]).hydra.sweep.dir == "multirun/now_4"
    assert launch(job, "-m", "seed=6,7", "hydra.sweep.dir=mine") == 0 and "mine" in swept


def test_one_run_has_no_table(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(lambda config: 0, "seed=1") == 0
    assert capsys.readouterr().out == ""


def test_slurm_takes_sweeps_alone(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(no_job, "launcher=slurm") == 2
    assert (
        capsys.readouterr().err
        == "error: launcher=slurm: Slurm only runs sweeps; add -m (train.py -m launcher=slurm ...)\n"
    )


def test_without_slurm_the_missing_commands_are_named(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("submitit")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert launch(no_job, "-m", "launcher=slurm", "seed=0,1") == 2
    assert capsys.readouterr().err.startswith(
        "error: launcher=slurm: expected local on a machine without sbatch, srun, "
    )
    assert os.listdir(tmp_path) == ["bin"]


def test_an_option_of_the_users_own_is_known_for_slurm(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    option = tmp_path / "mine" / "launcher" / "gpus.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("# @package _global_\ndefaults: [override /hydra/launcher: submitit_slurm]\n")
    for flag in ("--config-dir", str(tmp_path / "mine")), (f"hydra.searchpath=[file://{tmp_path / 'mine'}]",):
        assert launch(no_job, "launcher=gpus", *flag) == 2
        assert capsys.readouterr().err.startswith(
            "error: launcher=gpus: Slurm only runs sweeps; add -m (train.py -m launcher"
        )
    monkeypatch.setenv("PATH", str(tmp_path / "mine"))
    assert launch(no_job, "-m", "--config-dir", str(tmp_path / "mine"), "launcher=gpus", "seed=0,1") == 2
    assert capsys.readouterr().err.startswith(
        "error: launcher=gpus: expected local on a machine without sbatch, srun, "
    )


def test_a_restarted_run_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    assert going_on(config) == config
    for name in ("float.ckpt", "last.ckpt"):  # the later stage wins
        (tmp_path / name).touch()
        assert going_on(config) == replace(config, resume=str(tmp_path / name))
    (tmp_path / "rescue.yaml").touch()
    assert going_on(config) == replace(config, resume="auto")


@pytest.mark.parametrize(("count", "again"), [(None, False), ("0", False), ("2", True)])
def test_slurm_says_how_often_a_run_was_started(
    monkeypatch: pytest.MonkeyPatch, count: str | None, again: bool
) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    assert slurm.started_again() is again
