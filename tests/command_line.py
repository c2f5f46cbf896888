"""Command lines, in this process and in one of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from qatkit.config.schema import Config

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
RECIPES = ", ".join(sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))

# Before a command that is sent a Ctrl-C: in a shell's background it would be ignored.
FRESH = ("env", "--default-signal=INT")

# `launch(job, *typed)`, a fixture
Launch = Callable[..., int]


def no_job(config: Config) -> int:
    raise AssertionError("a mistake on the command line must be found before the job")


def python(*arguments: str, cwd: Path, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """A script with its arguments, from `cwd`."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout
    )
