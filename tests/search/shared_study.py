"""A small study that the tests of searches share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qatkit.config.schema import SearchConfig
from qatkit.config.search_space import axes
from qatkit.run import lock
from qatkit.search.study import SharedStudy

SPACE: dict[str, Any] = {
    "schedule.lr": {"low": 1e-4, "high": 1e-1, "log": True},
    "calibration": ["minmax", "mse"],
}
ASKED = SearchConfig(trials=3, space=SPACE, objectives=["accuracy", "size"], startup=2,
                     storage="journal")  # fmt: skip


def study_in(folder: Path, asked: SearchConfig = ASKED, seed: int = 0, **settings: Any) -> SharedStudy:
    return SharedStudy(asked, axes(asked.space), "name", folder, seed, {"schedule.epochs": 2} | settings)


def figures_of(number: int) -> dict[str, float]:
    return {"accuracy": 90.0 + number % 3, "size": 3.0 + number % 2}


TESTED = {"accuracy": 50.0}


def in_a_process(work: Callable[[], None]) -> int:
    """Returns the exit status of `work` in a forked process, since locks belong to processes."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            lock._HELD.clear()  # a new process holds no lock
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
