"""Tests of whole searches from the command line: trials are runs; failed or infeasible ones are reported."""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ROOT, Launch, no_job
from PIL import Image
from tiny_run import logits, top

from qatkit.config.compose import load_config
from qatkit.config.schema import Config
from qatkit.run.build import data_of
from qatkit.run.loop import epoch_listener
from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError

pytest.importorskip("optuna")

SEARCH = ["search=optuna", "search.storage=journal", "search.startup=2",
          "search.space={schedule.lr:{low:1e-4,high:1e-1,log:true},calibration:[minmax,mse]}"]  # fmt: skip
RUN = ["trainer=cpu", "model.name=tiny_run.Net", "data.image_size=8", "data.batch_size=32", "data.workers=0",
       "calibration.images=64", "schedule.epochs=2", "schedule.float_epochs=0", "trainer.progress=false",
       "verify.latency_runs=2", "verify.max_drop=null", "data.test_images=64"]  # fmt: skip
MINUTES = 25 * 60


def _study(folder: Path) -> dict[int, tuple[str, int, list[float]]]:
    """Returns (state, number of times its end was written, values) of each trial, read from the journal."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    (name,) = optuna.study.get_all_study_names(storage)
    told: dict[int, int] = {}
    for line in (folder / "study.journal").read_text().splitlines():
        entry = json.loads(line)
        if entry["op_code"] == 6:  # sets a trial's state
            told[entry["trial_id"]] = told.get(entry["trial_id"], 0) + 1
    trials = optuna.load_study(study_name=name, storage=storage).trials
    return {
        trial.number: (trial.state.name, told.get(trial._trial_id, 0), list(trial.values or ()))
        for trial in trials
    }


def _top1(folder: Path) -> float:
    """Returns the top-1 accuracy, in percent, of a run's INT8 file on the held-out images."""
    data = data_of(load_config(folder / "config.yaml"))
    images, labels = (torch.cat(parts).numpy() for parts in zip(*data.held_out_batches(), strict=True))
    return top(logits(folder / "model.int8.onnx", images), labels, 1)


def _report(folder: str, held_out: float, test: float) -> None:
    report = {
        "accuracy": {"int8": {"top1": test}},
        "latency": {},
        "sizes": {},
        "fidelity": {},
        "shortfalls": [],
        "measured": {"validation": {"accuracy": {"int8": {"top1": held_out}}}},
    }
    (Path(folder) / "report.json").write_text(json.dumps(report))


def test_trials_are_separate_runs_and_the_same_command_adds_none(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Config] = []

    def job(config: Config) -> int:
        seen.append(config)
        if len(seen) == 2:
            raise ConfigError("schedule.lr", config.schedule.lr, "another")
        for epoch in (1, 2):
            epoch_listener.validated("last", epoch, 90.0 - 10 * len(seen))
        _report(str(config.output_dir), held_out=90.0 + len(seen), test=50.0 - len(seen))
        return 0

    command = [
        *SEARCH,
        "search.trials=4",
        "output_dir=study",
        "export=release",
        f"export.publish={tmp_path}/there",
    ]
    assert launch(job, *command) == 0
    said = capsys.readouterr()
    assert [config.search.trials for config in seen] == [0, 0, 0, 0]
    assert [config.output_dir for config in seen] == [f"study/trials/{number}" for number in range(4)]
    assert len({config.schedule.lr for config in seen}) == 4
    assert not any(config.export.bundle or config.export.publish for config in seen)
    assert all(config.verify.validation for config in seen)
    # The second trial fails; the fourth is pruned, since it is below the median of the first and the third.
    assert {number: state for number, (state, _, _) in _study(tmp_path / "study").items()} == {
        0: "COMPLETE", 1: "FAIL", 2: "COMPLETE", 3: "PRUNED"}  # fmt: skip
    assert "4 of 4 trials: 2 complete, 1 pruned, 1 failed" in said.out and "schedule.lr=" in said.err
    # The held-out images decide, on which the third trial is best; the test accuracy, which says the
    # opposite, comes next.
    (row,) = [line.split() for line in said.out.splitlines() if line.startswith("2 ")]
    assert row[:3] == ["2", "93.00", "47.00"]
    assert (tmp_path / "study" / "search.html").is_file()

    assert launch(no_job, *command) == 0
    assert "4 of 4 trials" in capsys.readouterr().out


def test_algorithm_settings_are_searched_by_their_declared_type(launch: Launch) -> None:
    found: list[dict[str, Any]] = []

    def quick(config: Config) -> int:
        found.append(config.algorithm["smooth_quant"])
        _report(config.output_dir or "", 50.0, 50.0)
        return 0

    space = "{algorithm.smooth_quant.strength:{low:0,high:1},algorithm.smooth_quant.steps:{low:2,high:4}}"
    typed = [*RUN, *SEARCH[:-1], f"search.space={space}", "search.trials=2", "algorithm=smooth_quant"]
    assert launch(quick, *typed, "output_dir=study") == 0
    assert len(found) == 2
    assert all(0 < one["strength"] < 1 and type(one["steps"]) is int for one in found)


def test_a_search_whose_trials_all_fail_ends_with_the_reasons(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(config: Config) -> int:
        raise RuntimeError(f"no such thing in {Path(str(config.output_dir)).name}")

    command = [*RUN, *SEARCH, "search.trials=4", "output_dir=study"]
    assert launch(job, *command) == 2
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert last.startswith("error: search.trials=")
    assert "no such thing in 2; see study/trials/2" in last
    page = (tmp_path / "study" / "search.html").read_text()
    for number in range(3):
        (row,) = [line for line in said.out.splitlines() if line.startswith(f"{number} ")]
        assert f"failed: no such thing in {number}" in row and "schedule.lr=" in row
        assert f"no such thing in {number}" in page
    assert said.out.splitlines()[-1] == "page: study/search.html; run of each trial: study/trials/NUMBER"
    assert launch(job, *command) == 2  # continues with the last trial
    assert "4 of 4 trials: 0 complete, 4 failed" in capsys.readouterr().out


def test_a_search_without_a_feasible_trial_lists_what_it_found(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quick(config: Config) -> int:
        _report(config.output_dir or "", 50.0, 40.0)
        return 0

    bound = 'search.constraints=["accuracy>=97"]'
    assert launch(quick, *RUN, *SEARCH, bound, "search.trials=1", "output_dir=study") == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("0 ")]
    assert "accuracy 50.00 (violates the constraints)" in row


def test_a_study_goes_on_with_its_images_only(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for root, level in (("one", 10), ("copy", 10), ("changed", 11)):
        for split in ("train", "test"):
            for label in range(10):
                place = tmp_path / root / split / str(label) / "0.png"
                place.parent.mkdir(parents=True)
                Image.new("L", (8, 8), level * label).save(place)

    def quick(config: Config) -> int:
        _report(config.output_dir or "", 50.0, 50.0)
        return 0

    folder = f"output_dir={tmp_path / 'study'}"
    data = ["data.source=qatkit.data.image_folder", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"]
    run = [
        *(one for one in RUN if not one.startswith(("data.test_images", "data.batch_size"))),
        "data.batch_size=2",
        *data,
    ]
    run += [*SEARCH, folder]
    assert launch(quick, *[*run, "search.trials=1", f"data.root={tmp_path / 'one'}"]) == 0
    assert launch(quick, *[*run, "search.trials=2", f"data.root={tmp_path / 'copy'}"]) == 0
    capsys.readouterr()
    assert launch(no_job, *[*run, "search.trials=3", f"data.root={tmp_path / 'changed'}"]) == 2
    assert "data.root is images " in capsys.readouterr().err
    assert len(_study(tmp_path / "study")) == 2


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            ["search.space={schedule.lrr:[1,2]}"],
            "error: search.space.schedule.lrr=1: the value is not accepted (",
        ),
        (
            ["search.space={schedule.lr:{low:-1,high:1}}"],
            "error: search.space.schedule.lr=-1.0: the value is not accepted (",
        ),
        (
            ["search.space={calibration:[minmax,msee]}"],
            "error: search.space.calibration=msee: the value is not accepted (",
        ),
        (["schedule.lr=1e-3"], "error: schedule.lr=1e-3: search.space varies this key"),
    ],
)
def test_a_space_of_invalid_settings_is_refused_before_a_trial(
    launch: Launch, tmp_path: Path, typed: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = SEARCH[:-1] if "search.space" in typed[0] else SEARCH
    assert launch(no_job, *kept, *typed, "output_dir=study") == 2
    assert capsys.readouterr().err.startswith(says)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(("typed", "says"), [
    (["model.name=resnet181"], "error: model.name=resnet181: "),
    (["data.mean=[0.5]", "data.std=[0.5]"], "error: model.name=tiny_run.Net: the model failed on images [N, 1, 8, 8]"),
    (["data=pictures", "data.root=.", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"],
     "error: search.objectives=accuracy: expected one of agreement, sqnr, latency, speedup, size, since the images"),
    (["search.space={calibration.observer:[qatkit.quant.observers.MSEObserver,qatkit.quant.observers.Nope]}"],
     "error: search.space.calibration.observer=qatkit.quant.observers.Nope: the value is not accepted ("),
    (["search.space={data:[digits,synthetic]}"], "error: search.space.data=synthetic: the value is not accepted ("
     "data=synthetic: the key changes the images on which trials are compared"),
    (["search.space={verify.audit:[true,on]}"], "error: search.space.verify.audit=on: "
     "with the other settings, this value makes the same run as verify.audit=true"),
    (["search.space={calibration:[minmax,mse]}", "calibration.observer=qatkit.quant.observers.MSEObserver"],
     "error: search.space.calibration=mse: with the other settings, this value makes the same run as "
     "calibration=minmax"),
])  # fmt: skip
def test_a_fault_of_every_trial_is_reported_before_any_study(
    launch: Launch, tmp_path: Path, typed: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in range(4):
        Image.new("RGB", (8, 8), (place, 9, 9)).save(tmp_path / f"{place}.png")
    kept = SEARCH[:-1] if "search.space" in typed[0] else SEARCH
    assert launch(no_job, *RUN, *kept, *typed, "output_dir=study") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(says)
    assert not (tmp_path / "study").exists()


def test_trials_that_fall_short_say_so_and_share_no_ranges(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caches = []

    def job(config: Config) -> int:
        caches.append(config.calibration.cache)
        _report(str(config.output_dir), held_out=90.0, test=90.0)
        path = Path(str(config.output_dir)) / "report.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"shortfalls": ["verify.min_speedup=2.0: 1.5 times"]})
        )
        return 1

    typed = [*SEARCH, "search.trials=2", "output_dir=study", f"calibration.cache={tmp_path / 'ranges'}"]
    assert launch(job, *typed) == 1
    said = capsys.readouterr()
    assert "(falls short of verify.min_speedup=2.0)" in said.err and caches == [None, None]
    assert "trial 0 falls short: verify.min_speedup=2.0: 1.5 times" in said.out
    assert "falls short of verify.min_speedup=2.0" in (tmp_path / "study" / "search.html").read_text()


@pytest.mark.slow
def test_a_full_disk_is_no_attempt(launch: Launch) -> None:
    def full(config: Config) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "file")

    command = [*SEARCH, "search.trials=1", "search.attempts=1", "output_dir=study"]
    for _ in range(2):
        assert launch(full, *command) == 1

    def job(config: Config) -> int:
        _report(str(config.output_dir), held_out=90.0, test=90.0)
        return 0

    assert launch(job, *command) == 0


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param("an epoch", marks=pytest.mark.slow),
        pytest.param("its end", marks=pytest.mark.slow),
        # test_storage.py covers these failed writes too; the worker ends as in the previous case.
        pytest.param("an early end", marks=pytest.mark.slow),
        pytest.param("a failure", marks=pytest.mark.slow),
        "a signal",
    ],
)
def test_a_storage_that_is_away_is_no_attempt(
    ends: str,
    launch: Launch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Covers each kind of record that a worker may have to write while the database is locked."""
    monkeypatch.setattr("qatkit.search.storage._BUSY", 0.01)
    command = [
        *RUN, *SEARCH, "search.storage=null", "search.trials=1", "search.attempts=1", "output_dir=study"
    ]  # fmt: skip
    away: list[sqlite3.Connection] = []

    def job(config: Config) -> int:
        away.append(sqlite3.connect(tmp_path / "study" / "study.db"))
        away[0].execute("BEGIN EXCLUSIVE")
        if ends == "an epoch":
            epoch_listener.validated("last", 1, 50.0)
        elif ends == "an early end":
            raise epoch_listener.Pruned
        elif ends == "a failure":
            raise RuntimeError("as a test")
        elif ends == "a signal":
            raise stopping.Stopped(signal.SIGTERM, "as a test")
        return 0

    assert launch(job, *command) == (143 if ends == "a signal" else 2)
    assert ("in trial 0" if ends == "a signal" else "database is locked") in capsys.readouterr().err
    away.pop().close()

    def whole(config: Config) -> int:
        _report(str(config.output_dir), held_out=90.0, test=90.0)
        return 0

    assert launch(whole, *command) == 0
    assert "begun" not in (tmp_path / "study" / "search.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3 * MINUTES)
def test_two_workers_of_which_two_are_killed_lose_no_trial(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    wanted, folder = 8, tmp_path / "study"
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *RUN,
        *SEARCH,
        f"search.trials={wanted}",
        f"output_dir={folder}",
    ]

    def worker() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    workers = [worker(), worker()]
    for begun in (1, 4):  # kill when the checkpoint of that trial exists
        until = time.monotonic() + MINUTES
        while not (folder / "trials" / str(begun) / "last.ckpt").is_file() and time.monotonic() < until:
            time.sleep(0.02)
        killed = workers.pop(0)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        workers.append(worker())
    said = [one.communicate(timeout=MINUTES)[0].decode() for one in workers]
    assert all(one.returncode == 0 for one in workers), said
    assert (
        subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True).returncode
        == 0
    )

    trials = _study(folder)
    assert sorted(trials) == list(range(wanted))
    assert all(state in ("COMPLETE", "PRUNED") and told == 1 for state, told, _ in trials.values()), trials
    for number, (state, _, values) in trials.items():
        if state == "COMPLETE":  # the run's file reproduces the value in the study, on the held-out images
            assert _top1(folder / "trials" / str(number)) == pytest.approx(values[0])
