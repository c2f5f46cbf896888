"""Tests of the time spent waiting for a core, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat") or not hasattr(os, "sched_setaffinity"),
    reason="this system does not count how long threads wait",
)

_SHARED = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from qatkit_verify.latency import Waiting
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    waiting, end = Waiting(), time.monotonic() + 1
    while time.monotonic() < end:
        pass
    print(waiting.share())
finally:
    other.kill()
"""


def test_two_busy_processes_on_one_core_wait_as_long_as_they_run() -> None:
    done = subprocess.run([sys.executable, "-c", _SHARED], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.3  # 1 if both get a fair share
