"""Latency in several runtimes: each in a process of its own, and while one is timed the others are stopped.

    process of runtime A   float INT8 float INT8 ...  stopped                          float INT8 ...
    process of runtime B   stopped                    float INT8 float INT8 ...        stopped

A runtime's workers may keep spinning behind a run, each library in its own way, so two in one process steal each
other's cores. Within a process the files take turns round by round, as in `qatkit.verify.latency`; the processes take
turns of `_TURN` rounds, so that the machine's drift falls on all of them.

This file is also what such a process runs: `python -m qatkit.verify.runtimes.timing REQUEST`, with a line of JSON for
each number of rounds that it reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit.config.dotted import resolve
from qatkit.foreign import described
from qatkit.verify.feeds import Array
from qatkit.verify.latency import WARMUP, rounds

_TURN = 10  # rounds
Times = dict[str, NDArray[np.float64]]  # milliseconds, by file


def times_in_turns(
    runtimes: Iterable[str],
    files: Mapping[str, Path],
    feeds: Mapping[str, Mapping[str, Array]],
    *,
    threads: int,
    runs: int,
) -> dict[str, Times | str]:
    """Milliseconds of every run, [runs] by file, in each runtime; of one that fails, why.

    Args:
        runtimes: dotted paths of `Runtime` records.
        files: ONNX files by name.
        feeds: what each is given, by the names of its inputs.
        threads: of each runtime.
        runs: timed rounds of each file.
    """
    found: dict[str, Times | str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        given = []
        for name, path in files.items():
            given.append((str(path), str(Path(folder, f"{name}.npz")), list(feeds[name])))
            np.savez(given[-1][1], *feeds[name].values())
        started: dict[str, _Process] = {}
        for runtime in runtimes:
            one = stack.enter_context(_Process({"runtime": runtime, "threads": threads, "files": given}))
            started[runtime] = one
            one.rounds(WARMUP)  # the first ones, and whatever is wrong with the file
        for left in range(runs, 0, -_TURN):
            for one in started.values():
                one.rounds(min(_TURN, left))
        for runtime, one in started.items():
            times = np.concatenate(one.times[1:]) if not one.failed else np.zeros((0, 0))
            found[runtime] = one.failed or dict(zip(files, times.T, strict=True))
    return found


class _Process:
    """A runtime in a process of its own, stopped but for its own turns; `failed` says why it gives no more times."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.failed, self.times = "", list[NDArray[np.float64]]()
        here = os.pathsep.join(os.path.abspath(one) for one in sys.path)
        self._process = subprocess.Popen(  # noqa: S603 - this very file
            [sys.executable, "-m", __name__, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": here},
            process_group=0,  # a Ctrl-C of the terminal is for the parent, which ends it
        )

    def __enter__(self) -> _Process:
        return self

    def rounds(self, count: int) -> None:
        """Times so many rounds of every file."""
        if self.failed:
            return
        self._send("SIGCONT")
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(count, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self.failed = f"its process ended with status {self._process.wait()}"
            return
        self._send("SIGSTOP")
        reply = json.loads(answer)
        self.failed = reply["failed"]
        self.times.append(np.asarray(reply["times"], np.float64))

    def _send(self, name: str) -> None:
        if hasattr(signal, name):  # not on Windows
            self._process.send_signal(getattr(signal, name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # of what it no longer reads
            self._process.communicate()


def _serve(request: Mapping[str, Any]) -> None:
    """The process's side."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a runtime prints is no answer
    try:
        runtime = resolve(request["runtime"], "verify.runtimes")
        calls = []
        for path, feed, names in request["files"]:
            with np.load(feed) as arrays:
                given = dict(zip(names, arrays.values(), strict=True))
            calls.append(partial(runtime.open(Path(path), request["threads"]), given))
        for line in sys.stdin:
            times = rounds(calls, int(line), warmup=1)
            print(json.dumps({"failed": "", "times": times.tolist()}), file=answers, flush=True)
    except Exception as error:  # whatever a runtime raises
        print(json.dumps({"failed": described(error), "times": []}), file=answers, flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
