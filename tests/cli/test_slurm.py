"""Checks that runs on a Slurm cluster equal local ones, even if preempted, and report how they ended."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import FRESH, ROOT
from slurm_cluster import cluster, missing
from tiny_run import report_of, sha256

RUN = ["trainer=cpu", "model.name=tiny_run.Net", "data.image_size=8", "data.batch_size=8", "data.workers=0",
       "calibration.images=64", "schedule.epochs=12", "schedule.float_epochs=0", "trainer.progress=false",
       "trainer.checkpoint_every=20", "verify.latency_runs=2",
       "verify.max_drop=null", "data.test_images=64"]  # fmt: skip
MINUTES = 25 * 60  # a requeued job waits two minutes before Slurm starts it


@pytest.fixture
def environment() -> dict[str, str]:
    """Returns variables that make the tests' model importable and set one thread, since sums depend on the number."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def slurm(tmp_path: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    if absent := missing():
        pytest.skip(f"no {', '.join(absent)} here: apt-get install slurm-wlm munge")
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("no submitit here: the extra slurm")
    with cluster(tmp_path / "cluster") as found:
        yield environment | {"SLURM_CONF": found["SLURM_CONF"]}


@pytest.mark.slow
@pytest.mark.timeout(3 * MINUTES)
def test_runs_restarted_by_slurm_end_as_local_runs_do(
    slurm: dict[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    """One run is preempted, one is warned of its time limit, one runs undisturbed and one is cancelled."""
    typed = ["-m", "launcher=slurm", *RUN, "seed=0,1,2,3"]
    with (tmp_path / "sweep.out").open("w") as out:
        sweep = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *typed], cwd=tmp_path, env=slurm, stdout=out, stderr=out
        )
    told = []
    try:
        for number, command in (
            (0, ("scontrol", "requeue")),
            (1, ("scancel", "--signal=USR2")),
            (3, ("scancel",)),
        ):
            _begun(tmp_path, number)
            told.append(_tell(slurm, *command, f"1_{number}"))
        status = sweep.wait(MINUTES)
    finally:
        for process in (sweep, *told):
            process.kill()
            process.wait()

    said = (tmp_path / "sweep.out").read_text()
    assert status == 1, said  # the cancelled run's status
    rows = _rows(said)
    assert all(" done " in rows[f"seed={seed}"] for seed in range(3)), said
    assert "failed: Slurm ended the job: cancelled" in rows["seed=3"]

    folders = [_folder(tmp_path, number) for number in range(2)]
    assert all(report_of(folder)["notes"][0] == "resumed from last.ckpt" for folder in folders if folder)
    logs = [_log(tmp_path, number) for number in range(3)]
    assert all("interrupted at step" in log for log in logs[:2]) and "interrupted" not in logs[2]
    assert "queued again" in logs[1] and "queued again" not in logs[0]

    local = [sys.executable, str(ROOT / "train.py"), "-m", *RUN, "seed=0,1,2"]
    subprocess.run(
        local,
        cwd=_made(tmp_path / "local"),
        env=environment,
        check=True,
        timeout=MINUTES,
        capture_output=True,
    )
    for seed in range(3):
        ours, theirs = _folder(tmp_path, seed), _folder(tmp_path / "local", seed)
        assert ours is not None and theirs is not None
        assert sha256(ours / "model.int8.onnx") == sha256(theirs / "model.int8.onnx")
        a, b = (torch.load(folder / "last.ckpt", weights_only=True) for folder in (ours, theirs))
        assert a.keys() == b.keys()
        # Weights, optimizer, schedule and random state are compared. Lightning's callbacks store their
        # folder, and the record of a loaded module has an additional empty list.
        assert all(_same(a[part], b[part]) for part in a if part not in ("callbacks", "qatkit"))


@pytest.mark.slow
@pytest.mark.timeout(2 * MINUTES)
def test_an_interrupted_sweep_lists_its_runs_and_rejoins_them(slurm: dict[str, str], tmp_path: Path) -> None:
    """The command is interrupted while one run is done, one trains and one is queued.

    Repeated, it is killed while it waits; repeated again, it completes.
    """
    typed = [
        "-m",
        "launcher=slurm",
        "hydra.launcher.array_parallelism=1",
        *RUN,
        "schedule.epochs=4",
        "seed=0,1,2",
    ]
    command = [*FRESH, sys.executable, str(ROOT / "train.py"), *typed]

    with subprocess.Popen(
        command, cwd=tmp_path, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as sweep:
        _begun(tmp_path, 1)
        sweep.send_signal(signal.SIGINT)
        out, err = sweep.communicate(timeout=MINUTES)
    assert sweep.returncode == 130, err
    rows = _rows(out)
    assert " done " in rows["seed=0"] and " running, job 1_1 " in rows["seed=1"]
    assert " queued, job 1_2 " in rows["seed=2"]
    assert str(_folder(tmp_path, 1)) in rows["seed=1"]
    assert err.splitlines()[-1] == (
        "interrupted while 2 of 3 runs are on Slurm (job 1), where they continue: the same command waits for them"
        " without repeating any; scancel 1 ends them"
    )

    with subprocess.Popen(command, cwd=tmp_path, env=slurm, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True) as sweep:  # fmt: skip
        assert sweep.stderr is not None
        said = next(line for line in sweep.stderr if "submitted" in line)
        assert said == "3 of 3 runs were submitted before, job 1, and are not submitted again\n"
        sweep.kill()

    done = subprocess.run(
        command, cwd=tmp_path, env=slurm, capture_output=True, text=True, check=False, timeout=MINUTES
    )
    assert done.returncode == 0, done.stderr
    assert all(" done " in _rows(done.stdout)[f"seed={seed}"] for seed in range(3)), done.stdout
    assert _jobs(slurm) == {"1_0", "1_1", "1_2"}
    assert len(list(tmp_path.glob("outputs/*/*"))) == 3
    page = sorted(tmp_path.glob("multirun/*/compare.html"))[-1].read_text()
    assert all(folder.name in page for folder in tmp_path.glob("outputs/*/*"))


@pytest.mark.slow
@pytest.mark.timeout(2 * MINUTES)
def test_resuming_the_sweep_resumes_a_cancelled_run(slurm: dict[str, str], tmp_path: Path) -> None:
    """A finished run is not submitted again. A run that Slurm ended resumes from its checkpoint."""
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "-m",
        "launcher=slurm",
        *RUN,
        "schedule.epochs=6",
        "seed=0,1",
    ]
    with subprocess.Popen(command, cwd=tmp_path, env=slurm, stdout=subprocess.PIPE, text=True) as sweep:
        folder = _begun(tmp_path, 1)
        told = _tell(slurm, "scancel", "1_1")
        out, _ = sweep.communicate(timeout=MINUTES)
        told.kill()
        told.wait()
    assert sweep.returncode == 1 and "failed: Slurm ended the job: cancelled" in _rows(out)["seed=1"]
    again = [*command, "resume=auto"]
    done = subprocess.run(
        again, cwd=tmp_path, env=slurm, capture_output=True, text=True, check=False, timeout=MINUTES
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs were submitted before, job 1, and are not submitted again" in done.stderr
    assert all(" done " in _rows(done.stdout)[f"seed={seed}"] for seed in range(2)), done.stdout
    assert len(_jobs(slurm)) == 3 and len(list(tmp_path.glob("outputs/*/*"))) == 2
    assert "resumed from last.ckpt" in report_of(folder)["notes"][0]


def _rows(said: str) -> dict[str, str]:
    return {line.split()[0]: line for line in said.splitlines() if line.startswith("seed=")}


def _jobs(environment: dict[str, str]) -> set[str]:
    """Returns the ids of all jobs that this cluster has ever had."""
    command = ["squeue", "-h", "-a", "-r", "-t", "all", "-o", "%i"]
    return set(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    )


def _same(ours: Any, theirs: Any) -> bool:
    """Returns whether two values are equal, including every tensor in them."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return bool(ours == theirs)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _folder(place: Path, number: int) -> Path | None:
    return next(iter((place / "outputs" / "quickstart").glob(f"*_{number}")), None)


def _log(place: Path, number: int) -> str:
    return "".join(path.read_text() for path in place.glob(f"multirun/*/logs/1_{number}_0_log.err"))


def _begun(place: Path, number: int) -> Path:
    """Waits until a run has written a checkpoint, and returns its folder."""

    def trains() -> Path | None:
        folder = _folder(place, number)
        return folder if folder is not None and (folder / "last.ckpt").is_file() else None

    return _waited(trains)


def _waited(found: Callable[[], Path | None]) -> Path:
    until = time.monotonic() + MINUTES
    while time.monotonic() < until:
        if (path := found()) is not None:
            return path
        time.sleep(0.05)
    raise AssertionError("a run does not begin")


def _tell(environment: dict[str, str], *command: str) -> subprocess.Popen[bytes]:
    """Starts a command without waiting: scancel tries for minutes to signal a job that is already ending."""
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
