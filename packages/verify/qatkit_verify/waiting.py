"""How long the threads of this process were ready to run and had no core, by the kernel's own count."""

from __future__ import annotations

import contextlib
from pathlib import Path

_TASKS = Path("/proc/self/task")


class Waiting:
    """Counts from where it is made; threads that begin or end on the way are left out.

    Linux tells it (schedstat: nanoseconds on a core, nanoseconds in the queue for one); elsewhere nobody waits.
    """

    def __init__(self) -> None:
        self._before = _threads()

    def share(self) -> float:
        """Of the time that the threads ran, what they waited beside it."""
        now = _threads()
        pairs = [(self._before[name], now[name]) for name in self._before.keys() & now.keys()]
        ran, waited = (sum(after[k] - before[k] for before, after in pairs) for k in (0, 1))
        return waited / ran if ran else 0.0


def _threads() -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread ran and waited."""
    found = {}
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(
                OSError, ValueError
            ):  # it ended meanwhile, or this kernel says it otherwise
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[task.name] = (int(ran), int(waited))
    return found
