"""Tests of repeating the command of a stopped sweep with resume=auto: finished runs are not repeated."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import FRESH, ROOT, Launch
from tiny_run import report_of, sha256

from qatkit.config.compose import load_config, save_config
from qatkit.config.schema import Config
from qatkit.config.sweep_file import Known, SweepFile
from qatkit_verify.stopping import Stopped

SWEEP = ("-m", "seed=0,1,2")
TWO = ("-m", "seed=0,1")
MINUTES = 25 * 60


class Job:
    """Writes the files of a run; seed 2 misses a bound, and seed `stop_at` stops as if by Ctrl-C."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.stop_at: int | None = None

    def __call__(self, config: Config) -> int:
        folder = Path(str(config.output_dir))
        self.seen.append((config.seed, str(folder.absolute())))
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder / "config.yaml")
        (folder / "last.ckpt").touch()
        if config.seed == self.stop_at:
            raise Stopped(signal.SIGINT, "at step 3 of 9")
        shortfalls = ["verify.max_drop=1: more"] if config.seed == 2 else []
        report = {
            "accuracy": {"int8": {"top1": 90.0 + config.seed}},
            "latency": {},
            "sizes": {},
            "shortfalls": shortfalls,
            "mends": ["train longer"] * len(shortfalls),
        }
        (folder / "report.json").write_text(json.dumps(report))
        return len(shortfalls)

    @property
    def seeds(self) -> list[int]:
        return [seed for seed, _ in self.seen]


@pytest.fixture
def stopped(launch: Launch, capsys: pytest.CaptureFixture[str]) -> Job:
    """Returns the job of a sweep of three runs that was stopped in its second."""
    job = Job()
    job.stop_at = 1
    assert launch(job, *SWEEP) == 130
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == (
        "interrupted at step 3 of 9 in job 1 of the sweep: run the same command with resume=auto to continue"
    )
    assert [row[1] for row in _rows(said.out)] == ["90.00", "-"]
    job.stop_at = None
    return job


def _rows(said: str) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in said.splitlines() if line.startswith("seed=")]


def test_resume_lists_finished_runs_and_makes_only_the_others(
    launch: Launch, stopped: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, unfinished = (folder for _, folder in stopped.seen)
    assert launch(stopped, *SWEEP, "resume=auto") == 1  # the third falls short
    assert stopped.seeds[2:] == [1, 2] and stopped.seen[2][1] == unfinished
    said = capsys.readouterr()
    assert f"run 0 of the sweep is already finished; its results are in {folder}\n" in said.err
    rows = _rows(said.out)
    assert [row[:2] for row in rows] == [["seed=0", "90.00"], ["seed=1", "91.00"], ["seed=2", "92.00"]]
    assert rows[0][-1] == folder and rows[1][-1] == unfinished
    assert [row[4] for row in rows] == ["done", "done", "falls short: verify.max_drop=1: more"]
    assert list(Path("multirun").glob("*/compare.html"))


@pytest.mark.parametrize("seed", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_finished_run_in_the_folder_is_reported_not_repeated(
    seed: int, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may be killed after it wrote its report.

    Without resume=auto or with another setting, the job is called; a real one would refuse the folder.
    """
    job, typed = Job(), (f"seed={seed}", "output_dir=mine")
    assert launch(job, *typed) == seed // 2  # seed 2 falls short
    assert launch(job, *typed, "resume=auto") == seed // 2
    told = ["this run is already finished; its results are in mine"]
    if seed == 2:
        told += ["falls short: verify.max_drop=1: more", "  to fix it: train longer"]
    assert capsys.readouterr().err.splitlines() == told
    assert job.seeds == [seed]
    launch(job, *typed)
    launch(job, *typed, "resume=auto", "schedule.lr=0.5")
    assert job.seeds == [seed] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed", [SWEEP, (*SWEEP, "resume=auto", "schedule.lr=0.5"), ("-m", "seed=0,2", "resume=auto")]
)
def test_another_sweep_or_one_without_resume_makes_every_run(
    launch: Launch, stopped: Job, typed: tuple[str, ...]
) -> None:
    launch(stopped, *typed)
    assert stopped.seeds[2:] == ([0, 2] if "seed=0,2" in typed else [0, 1, 2])


@pytest.mark.slow
def test_a_run_whose_configuration_has_changed_since_is_made(launch: Launch, stopped: Job) -> None:
    path = Path(stopped.seen[0][1]) / "config.yaml"
    config = load_config(path)
    config.schedule.lr = 0.25
    save_config(config, path)
    assert launch(stopped, *SWEEP, "resume=auto") == 1
    assert stopped.seeds[2:] == [0, 1, 2]


@pytest.mark.slow
def test_resuming_a_failed_sweep_repeats_only_the_failed_run(launch: Launch) -> None:
    job, failing = Job(), [True]

    def fails(config: Config) -> int:
        if config.seed == 0 and failing:
            raise RuntimeError("a defect")
        return job(config)

    with pytest.raises(RuntimeError):
        launch(fails, *TWO)
    failing.clear()
    assert launch(fails, *TWO, "resume=auto") == 0
    assert job.seeds == [1, 0]


@pytest.mark.slow
def test_a_sweep_stopped_twice_remembers_all_of_it(launch: Launch, stopped: Job) -> None:
    stopped.stop_at = 2
    assert launch(stopped, *SWEEP, "resume=auto") == 130
    stopped.stop_at = None
    assert launch(stopped, *SWEEP, "resume=auto") == 1
    assert stopped.seeds == [0, 1, 1, 2, 2]
    # All runs are finished and reported, so the same command starts a new sweep.
    assert launch(stopped, *SWEEP, "resume=auto") == 1
    assert stopped.seeds[5:] == [0, 1, 2]
    assert len({folder for _, folder in stopped.seen}) == 6


def test_only_the_newest_sweep_file_of_the_same_command_is_read(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new", "another")):
        file = SweepFile(tmp_path / name, ["seed=0,1"] if name != "another" else ["seed=0,2"])
        file.note(["seed=0"], Known(f"folder {name}", f"{number}_0", "logs"))
        os.utime(file.path, (number, number))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sweep.json").write_text("[1")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "sweep.json").write_text(
        '{"typed": ["seed=0,1"], "ended": 1, "runs": {"a": {"b": 1}}}'
    )
    found = SweepFile(tmp_path / "now", ["resume=auto", "hydra.launcher.partition=gpu", "seed=0,1"])
    assert found.known(["resume=auto", "seed=0"]) == Known("folder new", "1_0", "logs") and not found.ended
    assert found.known(["seed=1"]) == Known()


@pytest.mark.slow
@pytest.mark.timeout(3 * MINUTES)
def test_a_real_sweep_goes_on_where_a_signal_ended_it(tmp_path: Path) -> None:
    run = ["trainer=cpu", "model.name=tiny_run.Net", "data.image_size=8", "data.batch_size=8", "data.workers=0",
           "calibration.images=64", "schedule.epochs=4", "schedule.float_epochs=0", "trainer.progress=false",
           "trainer.checkpoint_every=20", "verify.latency_runs=2", "verify.max_drop=null",
           "data.test_images=64"]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [*FRESH, sys.executable, str(ROOT / "train.py"), *SWEEP, *run]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + MINUTES
        while not list(tmp_path.glob("outputs/*/*_1/last.ckpt")) and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=MINUTES)
    assert process.returncode == 130, err
    assert [row[4] for row in _rows(out)] == ["done", "failed: interrupted"]
    (first,) = tmp_path.glob("outputs/*/*_0")
    before = sha256(first / "model.int8.onnx"), (first / "report.json").stat().st_mtime_ns
    done = subprocess.run(
        [*command, "resume=auto"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=MINUTES,
    )
    assert done.returncode == 0, done.stderr
    assert before == (sha256(first / "model.int8.onnx"), (first / "report.json").stat().st_mtime_ns)
    rows = _rows(done.stdout)
    assert [row[4] for row in rows] == ["done"] * 3
    for row in rows:
        assert row[1] == f"{report_of(tmp_path / row[-1])['accuracy']['int8']['top1']:.2f}"
    assert len(list(tmp_path.glob("outputs/*/*"))) == 3
    assert any("resumed from last.ckpt" in note for note in report_of(tmp_path / rows[1][-1])["notes"])
