"""Tests of a rescue, which tries configurations (rungs) in turn until one meets the target.

They check its rungs, their figures, the file that is handed over and the continuation of a killed rescue.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_run import BUNDLE, digits_test, logits, report_of, sha256, tiny, top

from qatkit.config.compose import load_config
from qatkit.config.rules import validate
from qatkit.config.schema import Config, ExportConfig, RescueConfig, TargetConfig, TrainerConfig
from qatkit.jobs import export_checkpoint, rescue
from qatkit.jobs.rungs import RUNGS
from qatkit.run.find import find_resume
from qatkit_verify.errors import ConfigError

ON_THE_WAY = [
    "whole_operators",
    "per_channel",
    "calibration",
]  # they quantize every operator: reported, but not handed over
FIRST = "placement"


def climbing(folder: Path, **changes: Any) -> Config:
    """Returns the config of a rescue that trains the float model and meets its target at `placement`."""
    config = tiny(folder, rescue=RescueConfig(climb=True), target=TargetConfig(max_drop=100.0))
    config.schedule.epochs = 0
    # With the range -1 to 1 and 255 steps around zero, every pixel would lie between two steps.
    config.data.mean, config.data.std = [0.4] * 3, [0.3] * 3
    return replace(config, **changes)


def held_out() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    images, labels = digits_test()
    return ((images * 0.5 + 0.5 - 0.4) / 0.3).astype(np.float32), labels


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = climbing(tmp_path_factory.mktemp("rescue") / "run")
    assert rescue.climb(config) == 0
    return config


def folder_of(config: Config) -> Path:
    assert config.output_dir is not None
    return Path(config.output_dir)


def test_the_climb_ends_at_the_first_rung_that_meets_the_target(climbed: Config) -> None:
    ladder = report_of(folder_of(climbed))["ladder"]
    assert [row["name"] for row in ladder["rungs"]] == ["float", "naive", *ON_THE_WAY, FIRST]
    assert ladder["chosen"] == FIRST and "meets the target" in ladder["advice"]
    assert {path.name for path in (folder_of(climbed) / "rungs").iterdir()} == {
        *("float", "naive", FIRST),
        *ON_THE_WAY,
    }


@pytest.mark.parametrize(
    ("name", "file"),
    [("naive", "model.static.onnx"), ("whole_operators", "model.int8.onnx"), (FIRST, "model.int8.onnx")],
)
def test_the_figures_of_a_rung_are_those_of_its_file(climbed: Config, name: str, file: str) -> None:
    images, labels = held_out()
    path = folder_of(climbed) / "rungs" / name / file
    row = next(row for row in report_of(folder_of(climbed))["ladder"]["rungs"] if row["name"] == name)
    floats = top(logits(folder_of(climbed) / "rungs" / "float" / "model.float.onnx", images), labels, 1)

    assert row["top1"] == pytest.approx(top(logits(path, images), labels, 1), abs=1e-9)
    assert row["drop"] == pytest.approx(floats - row["top1"], abs=1e-9)
    assert (row["bytes"], row["images"]) == (path.stat().st_size, 360)
    assert floats > 50  # it has learned


def test_a_whole_bundle_of_that_rung_is_handed_over(climbed: Config) -> None:
    folder = folder_of(climbed)
    assert {path.name for path in folder.iterdir()} == BUNDLE | {
        "float.ckpt",
        "rescue.yaml",
        "ladder.json",
        "rungs",
    }
    assert sha256(folder / "model.int8.onnx") == sha256(folder / "rungs" / FIRST / "model.int8.onnx")
    assert {"parity", "audit"} <= {key for key, value in report_of(folder).items() if value is not None}
    assert "Rescue, rung by rung" in (folder / "report.html").read_text()


def test_its_configuration_makes_the_same_file_again(climbed: Config, tmp_path: Path) -> None:
    folder = folder_of(climbed)
    config = load_config(folder / "config.yaml")
    assert config.calibration.search == "tournament" and not config.rescue.climb and config.resume is None
    again = replace(config, checkpoint=str(folder / "last.ckpt"), output_dir=str(tmp_path))
    export_checkpoint.export(again)
    assert sha256(tmp_path / "model.int8.onnx") == sha256(folder / "model.int8.onnx")


def test_a_killed_climb_goes_on_in_its_rung(climbed: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(folder_of(climbed), folder)
    for path in (folder / "report.json", folder / "rungs" / FIRST / "report.json"):
        path.unlink()
    config = replace(climbed, output_dir=str(folder), resume="auto")
    naive = (folder / "rungs" / "naive" / "report.json").stat().st_mtime_ns
    found = find_resume(config)
    assert found is not None and found[0] == folder.resolve()

    assert rescue.climb(config) == 0
    assert (folder / "rungs" / "naive" / "report.json").stat().st_mtime_ns == naive
    assert sha256(folder / "model.int8.onnx") == sha256(folder_of(climbed) / "model.int8.onnx")
    before = {row["name"]: row["seconds"] for row in report_of(folder_of(climbed))["ladder"]["rungs"]}
    after = {row["name"]: row["seconds"] for row in report_of(folder)["ladder"]["rungs"]}
    assert after["naive"] == before["naive"]


def test_another_climb_does_not_go_on_there(climbed: Config) -> None:
    with pytest.raises(ConfigError, match="holds another run"):
        rescue.climb(replace(climbed, resume=None))
    assert find_resume(replace(climbed, target=TargetConfig(max_drop=50.0))) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"trainer": TrainerConfig(devices=2)}, "trainer.devices=2"),
        ({"export": ExportConfig(mode="dynamic")}, "export.mode=dynamic"),
        ({"target": TargetConfig(max_drop=-0.5)}, "target.max_drop=-0.5"),
        ({"rescue": RescueConfig(climb=True, epochs=0)}, "rescue.epochs=0"),
    ],
)
def test_what_a_climb_can_not_be_asked_for(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    config = climbing(tmp_path / "run", **changes)
    config.schedule.float_epochs = 0
    with pytest.raises(ConfigError, match=key):
        validate(config)


@pytest.mark.slow
def test_all_rungs_and_a_target_that_none_meets(tmp_path: Path) -> None:
    config = climbing(tmp_path / "run", target=TargetConfig(max_drop=0.0))
    config.rescue.full = True
    config.model.name = "tiny_run.Uneven"
    config.schedule.float_epochs = 0
    config.verify.max_drop = None
    rescue.climb(config)
    ladder = report_of(tmp_path / "run")["ladder"]
    assert [row["name"] for row in ladder["rungs"]] == ["float", "naive", *(rung.name for rung in RUNGS)]
    assert all(row["agreement"] is not None for row in ladder["rungs"])
    by_name = {row["name"]: row for row in ladder["rungs"]}
    # Its channels differ by a factor of 16: per-tensor scales cost 1.3 dB of the logits' SQNR.
    assert by_name["per_channel"]["sqnr_db"] > by_name["whole_operators"]["sqnr_db"] + 0.5
    chosen = by_name[ladder["chosen"]]
    assert chosen["sqnr_db"] >= by_name["placement"]["sqnr_db"]
