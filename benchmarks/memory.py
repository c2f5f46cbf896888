"""Measures the peak resident memory in each stage of a run, in megabytes and as a multiple of the float model.

    uv run benchmarks/memory.py recipe=causal_lm_w4 model.name=hf/FOLDER data.root=TEXTS [key=value ...]

The arguments are those of train.py, and the run is a normal one. The kernel records the peaks (VmHWM, which is reset
at the start and end of each stage), so none is missed. The memory of the process just before the model was loaded
(Python, torch, the data) is subtracted. The script works only on Linux.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from qatkit import models
from qatkit.cli.scripts import train
from qatkit.jobs import pipeline
from qatkit.run.folder import Run

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MB = 1e6


class Peaks:
    """The peaks of resident memory by stage; the time within a nested stage counts only for that one.

    Attributes:
        before: bytes of the process just before the model was built.
        model: bytes of the float model's parameters and buffers.
        found: peak bytes by stage.
    """

    def __init__(self) -> None:
        self.before = self.model = 0
        self.found: dict[str, int] = {}
        self._stages = ["start"]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures the block as a stage of that name."""
        self._note()
        self._stages.append(name)
        try:
            yield
        finally:
            self._note()
            self._stages.pop()

    def build(self, build: Callable[..., nn.Module], *args: Any) -> nn.Module:
        """Builds a float model; the first one built is the reference of all peaks."""
        if self.model:
            return build(*args)
        self._note()
        self.before = status("VmRSS")
        model = build(*args)
        tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
        self.model = sum(one.numel() * one.element_size() for one in tensors)
        return model

    def _note(self) -> None:
        name = "/".join(self._stages[1:]) or self._stages[0]
        self.found[name] = max(self.found.get(name, 0), status("VmHWM"))
        _CLEAR.write_text("5", encoding="ascii")

    def table(self) -> str:
        """Returns the table in Markdown."""
        self._note()
        model = max(self.model, 1)
        lines = [
            f"float model {self.model / _MB:,.0f} MB; {self.before / _MB:,.0f} MB before it was loaded",
            "",
            "| stage | peak MB | increase MB | increase / float model |",
            "|---|---|---|---|",
        ]
        for name, peak in self.found.items():
            more = peak - self.before
            lines.append(f"| {name} | {peak / _MB:,.0f} | {more / _MB:,.0f} | {more / model:.2f} |")
        return "\n".join(lines)


def status(name: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class _Stage:
    """A stage of the pipeline whose memory is measured."""

    def __init__(self, stage: Any, peaks: Peaks) -> None:
        self._stage, self._peaks = stage, peaks
        self.done, self.restore, self.planned = stage.done, stage.restore, stage.planned

    def run(self, state: Any) -> Any:
        with self._peaks.stage(type(self._stage).__name__):
            return self._stage.run(state)


def watched(peaks: Peaks) -> None:
    """Patches qatkit so that `peaks` measures every stage of the runs in this process."""
    build, stage = models.build, Run.stage

    def named(run: Run, name: str, title: str = "") -> Any:
        @contextmanager
        def within() -> Iterator[None]:
            with stage(run, name, title), peaks.stage(name):
                yield

        return within()

    models.build = lambda *args: peaks.build(build, *args)
    Run.stage = named  # type: ignore[method-assign, assignment]
    pipeline.STAGES = [_Stage(one, peaks) for one in pipeline.STAGES]


if __name__ == "__main__":
    peaks = Peaks()
    watched(peaks)
    try:
        code = train()
    finally:
        print(peaks.table(), flush=True)
    sys.exit(code)
