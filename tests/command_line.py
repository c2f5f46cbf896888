"""Helpers that run command lines, in this process or in one of their own."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from qatkit.config.schema import Config

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
RECIPES = ", ".join(sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))

# Prefix of a command that receives a Ctrl-C, which a background process of a shell would ignore.
FRESH = ("env", "--default-signal=INT")

# Type of the fixture `launch(job, *typed)`.
Launch = Callable[..., int]


def no_job(config: Config) -> int:
    raise AssertionError("a mistake on the command line must be found before the job")


def python(*arguments: str, cwd: Path, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """Runs a script with its arguments from `cwd`."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout
    )


# Forks one process that has the libraries loaded, so that a command line starts in 0.1 s instead of 5 s.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["lightning", "onnxruntime", "qatkit.importing", "qatkit.jobs.pipeline"])


def run_script(
    name: str, *typed: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Runs one of the project's scripts with its arguments, on one thread of a forked process.

    Use `python` where start-up itself matters (imports, signals, an empty environment).
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, "stdout"), Path(folder, "stderr")]
        child = _FORKS.Process(
            target=_as_main, args=(name, typed, cwd, {**os.environ, **(env or {})}, streams)
        )
        child.start()
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            raise subprocess.TimeoutExpired([name, *typed], timeout)
        printed = [stream.read_text(encoding="utf-8") for stream in streams]
    return subprocess.CompletedProcess([name, *typed], child.exitcode, *printed)


def _as_main(
    name: str, typed: Sequence[str], cwd: Path, env: Mapping[str, str], streams: Sequence[Path]
) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    torch.set_num_threads(1)
    sys.argv = [name, *typed]
    runpy.run_path(str(ROOT / name), run_name="__main__")
