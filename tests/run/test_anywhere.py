"""Tests of whole runs under difficult conditions: odd names, full disks and folders that are not writable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Launch
from full_disk import largest_file
from PIL import Image
from tiny_run import BUNDLE, report_of, sha256

from qatkit.config.schema import Config
from qatkit.jobs import export_checkpoint, pipeline, quantize_file

TINY = ["trainer=cpu", "trainer.progress=false", "model.name=tiny_run.Net", "data.image_size=8", "data.batch_size=32",
        "data.train_images=64", "data.test_images=64", "calibration.images=64", "calibration.batch_size=16",
        "verify.latency_runs=2", "verify.max_drop=null", "verify.min_agreement=null", "schedule.float_epochs=1",
        "schedule.epochs=1"]  # fmt: skip
OF_FILE = ["mode=dynamic", "data.test_images=64", "verify.latency_runs=2", "verify.max_drop=null"]
NAME = "a b'\"=,%ü日本{x}::y$(z)[1]"


def typed(key: str, value: Path) -> str:
    """Returns `key=value` with the value quoted for Hydra, whatever it contains."""
    return f"{key}='" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize("name", [NAME, "~run", "é" * 120])
def test_a_folder_may_have_any_name(launch: Launch, tmp_path: Path, name: str) -> None:
    folder = Path(name)  # relative to the working directory, `tmp_path`
    assert launch(pipeline.train, *TINY, typed("output_dir", folder)) == 0
    assert {path.name for path in (tmp_path / name).iterdir()} == BUNDLE | {"float.ckpt"}

    again = [typed("checkpoint", folder / "last.ckpt"), typed("output_dir", folder / NAME)]
    assert launch(export_checkpoint.export, *again, from_checkpoint=True) == 0
    assert sha256(folder / NAME / "model.int8.onnx") == sha256(folder / "model.int8.onnx")
    of_file = [typed("onnx", folder / "model.float.onnx"), typed("output_dir", Path("dynamic"))]
    assert launch(quantize_file.quantize, *of_file, *OF_FILE, from_checkpoint=True) == 0


@pytest.mark.slow  # a whole run
def test_classes_and_images_may_have_any_name(launch: Launch, tmp_path: Path) -> None:
    classes = sorted(["ü b", "日本", "c'\"d\n", "=,%"])
    for split in ("train", "test"):
        for shade, name in enumerate(classes):
            (tmp_path / NAME / split / name).mkdir(parents=True)
            for i in range(16):
                Image.new("RGB", (8, 8), (60 * shade, i, 9)).save(
                    tmp_path / NAME / split / name / f"ä {i}\n.png"
                )
    data = [
        "data=cifar10_folder",
        typed("data.root", tmp_path / NAME),
        "model.num_classes=4",
        "data.workers=0",
    ]
    assert launch(pipeline.train, *data, *TINY, f"output_dir={tmp_path / 'run'}") == 0
    assert report_of(tmp_path / "run")["shortfalls"] == []


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize("room", [0, 2, 12, 20, 30, 40, 50, 60])
def test_a_full_disk_ends_in_one_line_and_the_run_resumes(
    launch: Launch, tmp_path: Path, room: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Simulates a full disk by a limit on the size of any file; a run's own files have 1 to 60 KiB."""

    def cramped(job: Callable[[Config], int]) -> Callable[[Config], int]:
        def run(config: Config) -> int:
            with largest_file(room * 1024):
                return job(config)

        return run

    folder = tmp_path / "run"
    command = [*TINY, f"output_dir={folder}", f"calibration.cache={tmp_path / 'ranges'}", "resume=auto"]
    status = launch(cramped(pipeline.train), *command)
    said = capfd.readouterr().err
    if status != 0:
        assert status == 1 and "Traceback" not in said
        assert said.splitlines()[-1].startswith("error: ") and "File too large: free some space" in said
        assert not list(tmp_path.rglob("*.part")) and not (folder / "report.json").exists()
        assert launch(pipeline.train, *command) == 0
    assert {path.name for path in folder.iterdir()} == BUNDLE | {"float.ckpt"}

    of_file = [f"onnx={folder / 'model.float.onnx'}", f"output_dir={tmp_path / 'file'}", *OF_FILE]
    status = launch(cramped(quantize_file.quantize), *of_file, from_checkpoint=True)
    if status != 0:
        assert status == 1 and capfd.readouterr().err.splitlines()[-1].startswith("error: ")
        assert launch(quantize_file.quantize, *of_file, from_checkpoint=True) == 0


@pytest.mark.slow  # a whole run
def test_a_home_that_is_not_there_is_not_missed(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent/home")
    monkeypatch.setenv("OMP_NUM_THREADS", "garbage")
    monkeypatch.chdir("/proc/sys")  # where nobody can write, not even root
    before = os.umask(0o077)
    try:
        assert launch(pipeline.train, *TINY, f"output_dir={tmp_path / 'run'}") == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()} == {0o600}


def test_a_folder_that_cannot_be_written_is_one_line(
    launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place in (Path("/proc/sys/run"), tmp_path / "file", tmp_path / "file" / "run"):
        assert launch(pipeline.train, *TINY, f"output_dir={place}") == 2
        said = capfd.readouterr().err
        assert said.startswith(
            f"error: output_dir={place}: expected a folder that can be created and written to ("
        )
        assert said.count("\n") == 1
