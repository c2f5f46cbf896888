"""Tests of one run per folder, across processes: a second one is refused, and a dead one does not block."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from qatkit.run.lock import locked
from qatkit_verify.errors import ConfigError

# Locks the folder and, like a run that loads images, forks a process that outlives it for a while.
HOLDER = """
import os, sys, time
from pathlib import Path
from qatkit.run.lock import locked
with locked(Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(float(sys.argv[2]))
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path, forked: float = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(folder), str(forked)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_run_is_refused_with_the_folder_and_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with holder(folder) as first:
        with pytest.raises(ConfigError) as refused, locked(folder):
            raise AssertionError
        assert re.fullmatch(
            rf"output_dir={folder}: expected a folder that no other run is using; process {first.pid} on "
            r"\S+ is using it",
            str(refused.value),
        )
        with locked(tmp_path / "another"):
            pass
        first.communicate("")
    with locked(folder):
        assert os.listdir(folder) == [".lock"]
    assert os.listdir(tmp_path) == []  # the folder that was made for the run is gone


# Chooses a run's folder on command and keeps it in use.
CHOOSER = """
import sys
from qatkit.config.schema import Config
from qatkit.run.find import taken
print("ready", flush=True)
sys.stdin.readline()
with taken(Config(name="n")) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHOOSER]
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
                )
            )
            for _ in range(3)
        ]
        for run in runs:
            assert run.stdout is not None and run.stdout.readline() == "ready\n"
        for run in runs:
            assert run.stdin is not None
            run.stdin.write("\n")
            run.stdin.flush()
        folders = [run.stdout.readline().strip() for run in runs if run.stdout is not None]
        assert len(set(folders)) == 3
        assert all((tmp_path / folder).is_dir() for folder in folders)
        (tmp_path / folders[0] / "config.yaml").touch()
        for run in runs:
            run.communicate()
    left = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert sorted(left) == [tmp_path / "outputs", tmp_path / "outputs/n", tmp_path / folders[0]]


def test_a_killed_run_holds_nothing_though_its_workers_live(tmp_path: Path) -> None:
    with holder(tmp_path, forked=3) as first:
        first.kill()
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        assert (tmp_path / ".lock").exists()
        with locked(tmp_path):
            assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} ")


def test_a_run_within_a_run_of_its_folder_is_part_of_it(tmp_path: Path) -> None:
    with locked(tmp_path):
        with locked(tmp_path):
            pass
        code = HOLDER.replace("print", "sys.exit('twice');print")
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), "0"], capture_output=True, check=False
        )
        assert b"no other run is using" in done.stderr
    assert os.listdir(tmp_path) == []


def test_half_written_files_of_killed_runs_are_removed_at_start(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone, living = (f".last.ckpt.{process}.0123abcd.part" for process in (dead.pid, os.getppid()))
    for name in (gone, living, "last.ckpt", ".mine.part"):
        (tmp_path / name).write_text("half")
    with locked(tmp_path):
        assert set(os.listdir(tmp_path)) == {living, "last.ckpt", ".mine.part", ".lock"}
