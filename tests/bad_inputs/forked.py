"""Runs command lines as a user would, each in a fork of this process, so that torch is loaded only once.

    outcome("train.py", ["schedule.lr=abc"], folder)     exit status, output, stderr, CPU seconds, new files in `folder`

The child runs the unmodified script in its own session and folder, with a memory limit, until a time limit.
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOBODY = 65534
_MEMORY = 24 * 2**30  # limit on the address space, of which torch's libraries alone map several GB
_TRACEBACK = 70  # exit status of a child that raised an exception


@dataclass(frozen=True)
class Outcome:
    """The outcome of one command line; `status` is -9 if it was killed.

    `cpu_seconds` is CPU time, since wall-clock time says little on a busy machine; `left` lists the new files
    and folders.
    """

    status: int
    out: str
    err: str
    cpu_seconds: float
    left: list[str]

    @property
    def lines(self) -> list[str]:
        """Returns the lines of stderr."""
        return self.err.splitlines()


def preload() -> None:
    """Imports what the scripts import when their job starts."""
    import lightning  # noqa: F401
    import sklearn.datasets
    import torchvision  # noqa: F401

    sklearn.datasets.load_digits()


def outcome(
    script: str, typed: Sequence[str], folder: Path, *, limit: float = 120, as_nobody: bool = False
) -> Outcome:
    """Runs `script` in `folder`, and kills it after `limit` seconds of wall-clock time."""
    there = _files(folder)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        deadline = time.monotonic() + limit
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about forks of processes with threads
            child = os.fork()
        if child == 0:
            _become(script, typed, folder, out.fileno(), err.fileno(), as_nobody)
        status, cpu_seconds = _wait(child, deadline)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "backslashreplace"))
    return Outcome(status, texts[0], texts[1], cpu_seconds, sorted(_files(folder) - there))


def _files(folder: Path) -> set[str]:
    return {str(Path(place, name).relative_to(folder)) for place, folders, files in os.walk(folder)
            for name in (*folders, *files)}  # fmt: skip


def _become(script: str, typed: Sequence[str], folder: Path, out: int, err: int, as_nobody: bool) -> None:
    """Runs the script in the child process; never returns."""
    status = _TRACEBACK
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = (
            os.fdopen(1, "w", closefd=False),
            os.fdopen(2, "w", closefd=False, errors="backslashreplace"),
        )
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        os.chdir(folder)
        if as_nobody:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        sys.argv = [script, *typed]
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:  # print it as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, deadline: float) -> tuple[int, float]:
    """Waits for the child, killing it at `deadline`; returns exit status and CPU seconds (with children)."""
    ended = 0
    while not ended and time.monotonic() < deadline:
        ended, status, used = os.wait4(child, os.WNOHANG)
        time.sleep(0 if ended else 0.005)
    if not ended:
        os.killpg(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
