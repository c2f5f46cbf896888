"""What every test has: one thread (the same sums in the same order, no fight over cores), and a command line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_line import CONF, Launch

from qatkit.config.command_line import Job, main
from qatkit_verify import stopping

torch.set_num_threads(1)
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background jobs pass Ctrl-C over, and we respect that
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def any_algorithm() -> Iterator[None]:
    """Lightning's `deterministic` holds for the whole process: afterwards every operator may run again."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Launch]:
    """`launch(job, *typed)`: `main` with a command line, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}

    def run(job: Job, *typed: str, from_checkpoint: bool = False) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *typed])
        monkeypatch.setattr(stopping._State, "wanted", None)  # each as if in a process of its own
        try:
            return main(job, CONF, from_checkpoint=from_checkpoint)
        finally:
            stopping.wait(False)

    yield run
    monkeypatch.setattr(stopping._State, "server", None)
    for number, handler in before.items():
        signal.signal(number, handler)
