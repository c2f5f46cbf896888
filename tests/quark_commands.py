"""Commands of docs/quark.md, run in this process, and a check that each test uses every key of the rows it covers."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from command_line import Launch
from quark_rows import not_typed

from qatkit.jobs.quantize_file import quantize

_QUICK = (
    "data=drawn", "data.count=32", "data.workers=0", "calibration.images=16", "calibration.batch_size=8",
    "verify.latency_runs=2", "verify.threads=1", "verify.max_drop=null", "verify.min_agreement=null",
    "trainer.progress=false",
)  # fmt: skip
_WRITTEN: dict[tuple[str, ...], Path] = {}


class Quark:
    """The commands that one test runs.

    Attributes:
        typed: all arguments so far.
        file: the file written last.
    """

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._launch, self._folder = launch, folder
        self.typed: list[str] = []
        self.file = folder

    def cleaned(self, source: Path, *typed: str) -> onnx.ModelProto:
        """Returns the file that mode=clean writes."""
        return self._written(source, typed)

    def static(self, source: Path, *typed: str) -> onnx.ModelProto:
        """Returns the file that mode=static writes with few random samples; arguments override settings."""
        return self.quantized(source, "mode=static", *typed)

    def quantized(self, source: Path, *typed: str) -> onnx.ModelProto:
        """Returns the file that a mode with calibration writes; `_QUICK` gives the settings that are not typed."""
        keys = {one.partition("=")[0] for one in typed}
        return self._written(source, (*(one for one in _QUICK if one.partition("=")[0] not in keys), *typed))

    def command(self, source: Path, *typed: str) -> Path:
        """Runs export.py and returns its output folder."""
        self.typed += typed
        target = self._folder / f"out{len(list(self._folder.glob('out*')))}"
        command = (f"onnx={source}", *typed, f"output_dir={target}")
        assert self._launch(quantize, *command, from_checkpoint=True) == 0
        return target

    def _written(self, source: Path, typed: tuple[str, ...]) -> onnx.ModelProto:
        """Returns the file that a command writes, or that of an earlier test with the same command."""
        self.typed += typed
        known = (source.name, str(source.stat().st_size), *typed)
        if known not in _WRITTEN:
            folder = self.command(source, *typed)
            kept = _kept() / str(len(_WRITTEN))
            shutil.copytree(folder, kept)
            _WRITTEN[known] = kept
        (mode,) = (one.partition("=")[2] for one in typed if one.startswith("mode="))
        self.file = _WRITTEN[known] / f"model.{mode}.onnx"
        return onnx.load(self.file)


def commands(request: pytest.FixtureRequest, launch: Launch, folder: Path) -> Iterator[Quark]:
    """Yields the commands for a test, then checks that the test used every key of its rows."""
    made = Quark(launch, folder)
    yield made
    if not made.typed:  # skipped
        return
    missing = not_typed(request.function.options, made.typed)
    assert not missing, f"{', '.join(missing)} of the rows of this test were not typed"


@functools.cache
def _kept() -> Path:
    holder = tempfile.TemporaryDirectory()
    atexit.register(holder.cleanup)
    return Path(holder.name)
