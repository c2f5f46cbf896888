"""Tests of the search for the run to resume, and of when a run is finished."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from qatkit.config.compose import save_config
from qatkit.config.schema import Config, ExportConfig, ScheduleConfig
from qatkit.records.run_files import HANDED_OVER
from qatkit.run.find import find_resume, finished


def _run_folder(name: str, config: Config, *, age: int, done: bool = False, saved: bool = True) -> Path:
    """Returns a run folder whose checkpoint is `age` s old; `done` adds a report, `saved` a config.yaml."""
    folder = Path("outputs", config.name, name)
    folder.mkdir(parents=True)
    checkpoint = folder / "last.ckpt"
    checkpoint.write_text("")
    os.utime(checkpoint, (1_000_000 - age, 1_000_000 - age))
    if saved:
        save_config(replace(config, output_dir=str(folder)), folder / "config.yaml")
    if done:
        (folder / "report.json").write_text("{}")
    return folder.resolve()


def test_resume_auto_finds_the_newest_equal_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(name="mine")
    _run_folder("older", config, age=50)
    expected = _run_folder("newest", config, age=40)
    _run_folder("finished", config, age=30, done=True)
    _run_folder("other", replace(config, schedule=ScheduleConfig(lr=0.5)), age=20)
    _run_folder("unknown", config, age=10, saved=False)
    _run_folder("one", Config(name="another"), age=0)

    assert find_resume(replace(config, resume="auto")) == (expected, expected / "last.ckpt")


@pytest.mark.parametrize("made", ["", *HANDED_OVER])
@pytest.mark.parametrize("shortfalls", [[], ["verify.max_drop=1: more"]])
def test_a_run_whose_bundle_is_missing_is_not_finished(
    made: str, shortfalls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with a report but no bundle was killed in between; a run that missed a bound needs no bundle."""
    monkeypatch.chdir(tmp_path)
    config = Config(name="mine", export=ExportConfig(bundle=True))
    folder = _run_folder("run", config, age=5)
    (folder / "report.json").write_text(json.dumps({"shortfalls": shortfalls}))
    if made:
        (folder / made).touch()

    left = not made and not shortfalls
    assert find_resume(config) == ((folder, folder / "last.ckpt") if left else None)
    assert finished(config, folder) is not left


def test_resume_auto_looks_in_the_output_dir_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(name="mine")
    folder = tmp_path / "here"
    _run_folder("run", config, age=5).rename(folder)

    assert find_resume(replace(config, resume="auto")) is None
    found = find_resume(replace(config, resume="auto", output_dir=str(folder)))
    assert found == (folder.resolve(), folder.resolve() / "last.ckpt")
