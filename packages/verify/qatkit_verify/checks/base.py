"""The inputs of a check, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from qatkit_verify.bundle.golden import Golden, read_golden
from qatkit_verify.bundle.manifest import GOLDEN_FILE, INT8_FILE, REPORT_FILE, Manifest
from qatkit_verify.errors import ConfigError, one_line
from qatkit_verify.feeds import Array
from qatkit_verify.runtimes.base import Execute
from qatkit_verify.untrusted import read_json

OK, SHORT, OPEN = "ok", "falls short", "not judged"


@dataclass(frozen=True)
class Found:
    """The answer to one question.

    Attributes:
        check: its name.
        verdict: OK, SHORT, or OPEN where nothing here can tell.
        seen: in words, with the figures.
        fix: where the check falls short, the proposed fix.
        figures: for programs.
    """

    check: str
    verdict: str
    seen: str
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain containers for JSON, where the fix has the key "mend" as in earlier records."""
        return {"mend" if key == "fix" else key: value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class CheckInputs:
    """What is checked, and how.

    Attributes:
        folder: of the bundle, whose files are those of the manifest.
        manifest: read.
        threads, runs: of ONNX Runtime; timed runs of each file.
        runtimes: dotted paths of other runtimes.
        pictures, recordings: a folder of pictures, or of WAV and FLAC files, in class folders, or None.
        min_speedup: over float.onnx; None: the run's own bound, where it has one.
        max_drop: points that pictures or recordings may give less than the report says.
    """

    folder: Path
    manifest: Manifest
    threads: int = 2
    runs: int = 50
    runtimes: Sequence[str] = ()
    pictures: Path | None = None
    min_speedup: float | None = None
    max_drop: float = 1.0
    recordings: Path | None = None

    @property
    def int8(self) -> Path:
        """The INT8 file."""
        return self.folder / INT8_FILE

    @cached_property
    def golden(self) -> Golden:
        """The golden vectors."""
        return read_golden(self.folder / GOLDEN_FILE)

    @cached_property
    def report(self) -> Mapping[str, Any]:
        """report.json; empty where the bundle has none."""
        path = self.folder / REPORT_FILE
        found = read_json(path) if path.is_file() else {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def batch(self) -> int | None:
        """The batch that the file was exported for; None where it is open."""
        from qatkit_verify.session import fixed_batch, open_session  # ONNX Runtime may not be there

        return fixed_batch(open_session(self.int8, threads=1, options=self.options))

    def outputs(self, execute: Execute) -> list[Array]:
        """What a function that runs the file gives for the golden inputs."""
        from qatkit_verify.session import in_its_batches

        if self.golden.runs:
            return [one for run in self.golden.runs for one in _answers(execute, run)]
        return list(in_its_batches(execute, self.golden.inputs, self.batch or 1))

    @property
    def one_batch(self) -> dict[str, Array]:
        """Golden inputs as the file takes them at once, some of them again where it takes more than there are."""
        if self.golden.runs:
            return dict(self.golden.inputs)
        rows = self.batch or 1
        return {name: np.resize(one, (rows, *one.shape[1:])) for name, one in self.golden.inputs.items()}

    @property
    def bound(self) -> float | None:
        """On the speed over float: as typed; else the run's own; 1 of an INT8 file whose run has none."""
        if self.min_speedup is not None:
            return self.min_speedup
        own = ((self.report.get("config") or {}).get("verify") or {}).get("min_speedup")
        integer = str(self.report.get("label", "INT8")).startswith("INT8")
        return float(own) if own is not None else 1.0 if integer else None

    @property
    def options(self) -> dict[str, str]:
        """Session config entries under which the figures hold, all of them.

        A bundle of an older qatkit has those of the backend alone, in its report; the others were unset.
        """
        from qatkit_verify.session import UNSET_OPTIONS

        told = self.manifest.session_options
        return {**UNSET_OPTIONS, **(self.report.get("session_options") or {} if told is None else told)}

    @cached_property
    def answers(self) -> dict[bool, list[Array]]:
        """The outputs of ONNX Runtime here for the golden inputs, with optimizations (True) and without (False)."""
        return {optimize: self.answers_with(self.options, optimize=optimize) for optimize in (False, True)}

    def answers_with(self, options: Mapping[str, str], *, optimize: bool = True) -> list[Array]:
        """Returns the outputs of ONNX Runtime here for the golden inputs, with these session config entries."""
        from qatkit_verify.session import open_session

        session = open_session(self.int8, threads=self.threads, optimize=optimize, options=options)
        return self.outputs(lambda given: session.run(None, dict(given)))


def _answers(execute: Execute, run: Mapping[str, Array]) -> list[Array]:
    """The outputs for the arrays of a run, which the runtime may refuse."""
    try:
        return [np.asarray(one) for one in execute(run)]
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        given = ", ".join(f"{name} {one.dtype} {list(one.shape)}" for name, one in run.items())
        raise ConfigError("golden", given, f"arrays that the file takes ({one_line(error)})") from error
