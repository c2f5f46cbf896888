"""Fixtures and settings of all tests: `launch`, and one thread (fixed order of sums, no contention)."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import CONF, Launch
from language import tokenizer

from qatkit.cli.command_line import Job, main
from qatkit_verify import stopping

torch.set_num_threads(1)
# Many tests start a new Python. Without byte code on disk, each of them would compile torch again (6 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # background jobs of a shell inherit SIG_IGN, which qatkit respects
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Excludes all imported objects from later garbage collections, which would take 0.25 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def any_algorithm() -> Iterator[None]:
    """Allows nondeterministic operators again after a test, in case Lightning's `deterministic` forbade them."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Launch]:
    """Returns `launch(job, *typed)`, which calls `main` with a command line in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}

    def run(job: Job, *typed: str, from_checkpoint: bool = False) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *typed])
        monkeypatch.setattr(stopping._State, "wanted", None)  # as in a new process
        try:
            return main(job, CONF, from_checkpoint=from_checkpoint)
        finally:
            stopping.wait(False)

    yield run
    monkeypatch.setattr(stopping._State, "server", None)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """Starts a PostgreSQL server on a free port and yields the URL of its database."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [
        Path(one) for one in [shutil.which("initdb")] if one
    ]
    pytest.importorskip("psycopg")
    if not found:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        as_owner = []
        if os.getuid() == 0:  # the server refuses to run as root
            shutil.chown(folder, "postgres")
            as_owner = ["runuser", "-u", "postgres", "--"]

        def run(name: str, *arguments: str) -> None:
            command = [*as_owner, str(found[-1].with_name(name)), "-D", f"{folder}/data", *arguments]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=120)

        run("initdb", "-A", "trust", "-U", "worker")
        run("pg_ctl", "-w", "-l", f"{folder}/log", "-o", f"-p {port} -k {folder} -h 127.0.0.1", "start")
        try:
            yield f"postgresql://worker@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of a tokenizer file with 320 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer().save(str(path))
    return path
