"""Measures latency in several runtimes: one process per runtime and file, of which only one runs at a time.

    A, float     run run run ...  stopped          stopped          stopped          run run run ...
    A, INT8      stopped          run run run ...  stopped          stopped          stopped
    B, float     stopped          stopped          run run run ...  stopped          stopped
    B, INT8      stopped          stopped          stopped          run run run ...  stopped

A runtime's workers may keep spinning after a run, each library in its own way. Two files in one process
therefore steal each other's cores, and so do two processes. The processes take turns of `_TURN` runs, so that
the machine's drift affects all of them. Each timed run follows an untimed one, as in `qatkit_verify.latency`.

Each process runs `python -m qatkit_verify.runtimes.timing REQUEST`. For each line of stdin, which
is a number of runs, it prints a line of JSON with their times.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.dotted import resolve
from qatkit_verify.feeds import Array
from qatkit_verify.foreign import described
from qatkit_verify.latency import WARMUP, rounds

_TURN = 5  # runs per turn
Times = dict[str, NDArray[np.float64]]  # milliseconds, by file


def times_in_turns(
    runtimes: Collection[str],
    files: Mapping[str, Path],
    feeds: Mapping[str, Mapping[str, Array]],
    *,
    threads: int,
    runs: int,
) -> dict[str, Times | str]:
    """Returns, by runtime, the milliseconds of every run ([runs] by file), or why the runtime failed.

    Args:
        runtimes: the dotted paths of `Runtime` records.
        files: ONNX files by name.
        feeds: the inputs of each file, by input name.
        threads: the number of threads of each runtime.
        runs: the number of timed runs of each file.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name in files:
            np.savez(Path(folder, f"{name}.npz"), *feeds[name].values())
        started = {
            (runtime, name): stack.enter_context(
                _Process(
                    {
                        "runtime": runtime,
                        "threads": threads,
                        "file": str(path),
                        "feed": str(Path(folder, f"{name}.npz")),
                        "inputs": list(feeds[name]),
                    }
                )
            )
            for runtime in runtimes
            for name, path in files.items()
        }
        for one in started.values():
            one.run(WARMUP)  # warms up, and raises no error yet: `failed` keeps it
        for left in range(runs, 0, -_TURN):
            for one in started.values():
                one.run(min(_TURN, left))
        return {runtime: _gathered(runtime, files, started) for runtime in runtimes}


def _gathered(runtime: str, files: Iterable[str], started: Mapping[tuple[str, str], _Process]) -> Times | str:
    """Returns the times of one runtime's processes without the warm-up, or why one of them failed."""
    own = {name: started[runtime, name] for name in files}
    failed = next((one.failed for one in own.values() if one.failed), "")
    return failed or {name: np.concatenate(one.times[1:]) for name, one in own.items()}


class _Process:
    """A process that runs a file in a runtime, and is stopped except in its own turns.

    Attributes:
        failed: why the process was given up; "" while it works.
        times: the milliseconds of the runs, per call of `run`.
    """

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
            process_group=0,  # Ctrl-C in the terminal goes to the parent, which ends this process
        )

    def __enter__(self) -> _Process:
        return self

    def run(self, count: int) -> None:
        """Times the given number of runs."""
        if self.failed:
            return
        self._send(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(count, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self.failed = f"its process ended with status {self._process.wait()}"
            return
        self._send(signal.SIGSTOP)
        reply = json.loads(answer)
        self.failed = reply["failed"]
        self.times.append(np.asarray(reply["times"], np.float64))

    def _send(self, number: signal.Signals) -> None:
        """Sends a signal to the process group, which includes processes that a runtime started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # it no longer reads them
                pipe.close()


def _serve(request: Mapping[str, Any]) -> None:
    """Opens the file in a process of its own, and times as many runs as each line of stdin asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for answers, not for what a runtime prints
    try:
        runtime = resolve(request["runtime"], "verify.runtimes")
        with np.load(request["feed"]) as arrays:
            given = dict(zip(request["inputs"], arrays.values(), strict=True))
        call = partial(runtime.open(Path(request["file"]), request["threads"]), given)
        for line in sys.stdin:
            times = rounds([call], int(line), warmup=1)[:, 0]
            print(json.dumps({"failed": "", "times": times.tolist()}), file=answers, flush=True)
    except Exception as error:  # whatever a runtime raises
        print(json.dumps({"failed": described(error), "times": []}), file=answers, flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
