"""Tests of several processes in one run: none waits forever for the others, and all need the same folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import FRESH, Launch, no_job

from qatkit.config.schema import Config, TrainerConfig
from qatkit.jobs.checks import check_machine
from qatkit.run.lock import LOCK_FILE, at_work, locked
from qatkit.run.loop import ranks
from qatkit_verify.errors import ConfigError

# Prints that it begins, then waits in torch's library for another process that never comes.
_WAITS = """
import sys
from torch.distributed import TCPStore
from qatkit.run.loop import ranks
from qatkit_verify import stopping

with stopping.served(), ranks.peers(True):
    if sys.argv[1] == "trains":
        stopping.wait(True)
        ranks._A_STEP = 6.0
    print("begins", flush=True)
    TCPStore("127.0.0.1", 0, 2, True)
"""
# Starts and ends processes that load images, then runs a step that outlasts the wait after a signal.
_LOADS = """
import sys, time
from torch.utils.data import DataLoader
from qatkit.run.loop import ranks
from qatkit_verify import stopping

ranks._A_STEP = ranks._A_CALL = 1.0
with stopping.served(), ranks.peers(True):
    stopping.wait(True)
    for _ in range(2):
        list(DataLoader(range(4), num_workers=1))
    time.sleep(4)
    print("trains", flush=True)
    while stopping.wanted() is None:
        time.sleep(0.1)
    print("keeps a checkpoint", flush=True)
    stopping.check()
"""
# Runs as the first process; its child ends by a signal that only the child got.
_CHILD = """
import subprocess, sys
from torch.distributed import TCPStore
from qatkit.run.loop import ranks
from qatkit_verify import stopping

ranks._BEHIND = 3.0
ranks._Family.children = [subprocess.Popen([sys.executable, "-c", "raise SystemExit(143)"])]
with stopping.served(), ranks.peers(True):
    TCPStore("127.0.0.1", 0, 2, True)
"""
# Runs as another process, whose parent was gone before it first looked.
_ORPHAN = """
from pathlib import Path
from qatkit.run.loop import ranks

ranks.main_process = lambda: False
ranks.wait_for_first(Path("never.ckpt"))
"""


def _script(text: str, *typed: str, **environment: str) -> subprocess.Popen[str]:
    command = [*FRESH, sys.executable, "-c", text, *typed]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("number", "when"),
    [(signal.SIGINT, "before"), pytest.param(signal.SIGTERM, "trains", marks=pytest.mark.slow)],
)
def test_a_signal_reaches_a_process_that_waits_in_a_library(number: int, when: str) -> None:
    with _script(_WAITS, when) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begins\n"
            time.sleep(1)
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number, said
    assert said.splitlines()[-1] == (
        "interrupted while waiting for other processes: run the same command with resume=auto to continue"
    )


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_process_blocked_in_a_library() -> None:
    with _script(_WAITS.replace("6.0", "600.0"), "trains") as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begins\n"
            for _ in range(2):
                time.sleep(1)
                process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130


def test_the_end_of_a_loader_process_does_not_end_the_run() -> None:
    with _script(_LOADS) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "trains\n"
            process.send_signal(signal.SIGINT)
            told, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (told, process.returncode) == ("keeps a checkpoint\n", 130), said


def test_a_child_killed_by_a_signal_ends_the_first_process() -> None:
    with _script(_CHILD) as process:
        try:
            _, said = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 143
    assert "error: process 2 of 2 was ended by SIGTERM, so this run ends" in said


def test_a_process_whose_parent_was_gone_before_it_looked_ends() -> None:
    with _script(_ORPHAN, **{ranks.PARENT: "1"}) as process:
        try:
            process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 1


def test_who_is_at_work_is_known_of_this_machine(tmp_path: Path) -> None:
    assert at_work(tmp_path) is False
    with locked(tmp_path):
        assert at_work(tmp_path) is True
        text = (tmp_path / LOCK_FILE).read_text()
    for written, expected in (
        (text.replace(str(os.getpid()), str(2**22 + 1)), False),  # above the largest process id
        ("process 1 on another.machine\n", None),
        ("", None),
        ("something else", None),
    ):
        (tmp_path / LOCK_FILE).write_text(written)
        assert at_work(tmp_path) is expected, written


def test_a_process_that_waits_where_nobody_is_at_work_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "main_process", lambda: False)
    monkeypatch.setattr(ranks, "_NOBODY", 1.0)
    with pytest.raises(
        ConfigError, match=r"output_dir=.*: expected the folder in which the first process works"
    ):
        ranks.wait_for_first(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("trainer", "environment"),
    [
        (TrainerConfig(accelerator="cpu", devices=2), {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}),
        (TrainerConfig(accelerator="cpu", devices=2), {"TORCHELASTIC_RUN_ID": "7"}),
        (TrainerConfig(accelerator="cpu", devices=1, num_nodes=2), {}),
    ],
)
def test_processes_that_others_start_are_told_their_folder(
    trainer: TrainerConfig, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that output_dir=null is refused: each process would make its own folder, named by the time."""
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=r"^output_dir=null: expected the same folder for all 2 processes"):
        check_machine(Config(trainer=trainer))
    check_machine(Config(trainer=trainer, output_dir="mine"))
    check_machine(Config(trainer=trainer, resume="mine/last.ckpt"))
    for name in environment:
        monkeypatch.delenv(name)
    check_machine(
        Config(trainer=TrainerConfig(accelerator="cpu", devices=2))
    )  # starts the other process itself


@pytest.mark.parametrize("gpus", [1, 4])
def test_all_gpus_of_a_machine_are_the_tasks_of_a_job_or_are_not(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that a folder is required only if the tasks of the Slurm job are the run's processes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    config = Config(trainer=TrainerConfig(devices=-1))
    if gpus == 1:
        check_machine(config)
    else:
        with pytest.raises(
            ConfigError, match=r"^output_dir=null: expected the same folder for all 4 processes"
        ):
            check_machine(config)


def test_such_a_mistake_is_one_line(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert launch(no_job, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: output_dir=null: ") and said.count("\n") == 1
