"""Defines the inputs and the result of a check."""

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
    """The result of a check.

    Attributes:
        check: the name of the check.
        verdict: OK if the check passed, SHORT if it fell short, or OPEN if it cannot be judged here.
        seen: the result in words, with the figures.
        fix: the proposed fix if the check falls short.
        figures: the figures as a dictionary, for programs.
    """

    check: str
    verdict: str
    seen: str
    fix: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain containers for JSON, in which the fix has the key "mend" as in earlier records."""
        return {"mend" if key == "fix" else key: value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class CheckInputs:
    """The bundle to check, and the settings of the checks.

    Attributes:
        folder: the folder of the bundle, whose files match the manifest.
        manifest: the manifest that was read.
        threads: the number of threads of ONNX Runtime.
        runs: the number of timed runs of each file.
        runtimes: names or dotted paths of other runtimes.
        pictures: a folder of pictures with one folder per class; None to skip this check.
        recordings: a folder of WAV and FLAC files with one folder per class; None to skip this check.
        min_speedup: the minimum speed-up over float.onnx; None: see `bound`.
        max_drop: by how many percentage points top-1 on pictures or recordings may be below the report's; two
            standard errors of the measured top-1 are added to it.
        accept_missed: whether a bundle passes although its run missed bounds.
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
    accept_missed: bool = False

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
        """The contents of report.json; empty if the bundle has none."""
        path = self.folder / REPORT_FILE
        found = read_json(path) if path.is_file() else {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def batch(self) -> int | None:
        """The batch size that the file was exported for; None if it is dynamic."""
        from qatkit_verify.session import fixed_batch, open_session  # ONNX Runtime may not be installed

        return fixed_batch(open_session(self.int8, threads=1, options=self.options))

    def outputs(self, execute: Execute) -> list[Array]:
        """Returns the outputs for the golden inputs; `execute` runs the file.

        For a model of arrays, they are the outputs of all runs, run after run.
        """
        from qatkit_verify.session import in_its_batches

        if self.golden.runs:
            return [one for run in self.golden.runs for one in _answers(execute, run)]
        return list(in_its_batches(execute, self.golden.inputs, self.batch or 1))

    @property
    def one_batch(self) -> dict[str, Array]:
        """The golden inputs as one batch: repeated or cut to the file's batch size (1 if it is dynamic).

        For a model of arrays, they are the inputs of the first run.
        """
        if self.golden.runs:
            return dict(self.golden.inputs)
        rows = self.batch or 1
        return {name: np.resize(one, (rows, *one.shape[1:])) for name, one in self.golden.inputs.items()}

    @property
    def bound(self) -> float | None:
        """The minimum speed-up over float: `min_speedup`, else the `verify.min_speedup` of the bundle's run.

        If neither is set, it is 1 for an INT8 file, and None (no minimum) for other files.
        """
        if self.min_speedup is not None:
            return self.min_speedup
        own = ((self.report.get("config") or {}).get("verify") or {}).get("min_speedup")
        integer = str(self.report.get("label", "INT8")).startswith("INT8")
        return float(own) if own is not None else 1.0 if integer else None

    @property
    def options(self) -> dict[str, str]:
        """All session config entries with which the figures of the bundle are valid.

        A bundle of an older qatkit stores only the backend's entries, in its report; its run set no others.
        """
        from qatkit_verify.session import UNSET_OPTIONS

        told = self.manifest.session_options
        return {**UNSET_OPTIONS, **(self.report.get("session_options") or {} if told is None else told)}

    @cached_property
    def answers(self) -> dict[bool, list[Array]]:
        """ONNX Runtime's outputs for the golden inputs, with optimizations (True) and without (False)."""
        return {optimize: self.answers_with(self.options, optimize=optimize) for optimize in (False, True)}

    def answers_with(self, options: Mapping[str, str], *, optimize: bool = True) -> list[Array]:
        """Returns ONNX Runtime's outputs for the golden inputs with the given session config entries."""
        from qatkit_verify.session import open_session

        session = open_session(self.int8, threads=self.threads, optimize=optimize, options=options)
        return self.outputs(lambda given: session.run(None, dict(given)))


def _answers(execute: Execute, run: Mapping[str, Array]) -> list[Array]:
    """Returns the outputs for the arrays of a run; raises ConfigError if the runtime rejects them."""
    try:
        return [np.asarray(one) for one in execute(run)]
    except Exception as error:  # ONNX Runtime's exceptions have no public common base
        given = ", ".join(f"{name} {one.dtype} {list(one.shape)}" for name, one in run.items())
        raise ConfigError(
            "golden", given, reason=f"the runtime failed on these inputs ({one_line(error)})"
        ) from error
