"""Commands of docs/quark.md, run in this process, and a check that each key of a row was typed."""

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
    """Commands of one test.

    Attributes:
        typed: all that was typed.
        file: the latest written file.
    """

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._launch, self._folder = launch, folder
        self.typed: list[str] = []
        self.file = folder

    def cleaned(self, source: Path, *typed: str) -> onnx.ModelProto:
        """Returns the file of mode=clean."""
        return self._written(source, typed)

    def static(self, source: Path, *typed: str) -> onnx.ModelProto:
        """Returns the file of mode=static, of few drawn samples; what is typed twice counts as it was typed last."""
        return self.quantized(source, "mode=static", *typed)

    def quantized(self, source: Path, *typed: str) -> onnx.ModelProto:
        """Returns the file of a mode that calibrates."""
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
        """Returns the file that a command writes, from an earlier test where one typed the same."""
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
    """Gives a test its commands, and checks that each key of its rows was typed."""
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
