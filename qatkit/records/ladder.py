"""What each rung came to, as plain data: the table at the end, and the file by which a killed climb goes on."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qatkit.records.figures import figures_of
from qatkit.records.run_files import LADDER_FILE
from qatkit.records.scores import with_score
from qatkit_verify.classification import NAMES, names_of
from qatkit_verify.files import write_text
from qatkit_verify.records import TaskNames


@dataclass(frozen=True)
class RungResult:
    """One rung, measured in ONNX Runtime; None where it was not.

    Attributes:
        name, title: of the rung; the title says what is done, in words.
        folder: of its run, relative to that of the climb; "" of one that made no file.
        score: the task's main metric; None without labels.
        drop: points below float's.
        agreement: share of the compared images that are decided as by float.
        kl, sqnr_db: of the outputs against float's; of equal ones there are no decibels.
        images: on which the metric was measured, or without labels what is compared.
        latency_ms, ratio: median of a run, and float's over it, interleaved.
        bytes, size_ratio: of the file, and over float's.
        seconds: that the rung took.
        meets: whether the target is met.
        kept: whether the rungs behind build on it.
        why: what decided, in words.
    """

    name: str
    title: str
    folder: str = ""
    score: float | None = None
    drop: float | None = None
    agreement: float | None = None
    kl: float | None = None
    sqnr_db: float | None = None
    images: int = 0
    latency_ms: float | None = None
    ratio: float | None = None
    bytes: int | None = None
    size_ratio: float | None = None
    seconds: float = 0.0
    meets: bool = False
    kept: bool = False
    why: str = ""

    @property
    def measured(self) -> bool:
        """Whether there is a file to compare."""
        return self.agreement is not None


@dataclass(frozen=True)
class Ladder:
    """A climb.

    Attributes:
        rungs: float first, then as climbed.
        chosen: name of the rung whose file is handed over; "" while the climb goes on.
        target: what was aimed at, in words.
        advice: one line.
        task: what the figures are of.
    """

    rungs: Sequence[RungResult] = ()
    chosen: str = ""
    target: str = ""
    advice: str = ""
    task: TaskNames = NAMES


def rung_result(name: str, title: str, folder: str, report: dict[str, Any], key: str = "int8") -> RungResult:
    """What a finished run's report.json says of its file (`key`: "int8"), or of the float file beside it."""
    found = figures_of(report, key)
    return RungResult(
        name,
        title,
        folder,
        score=found.score,
        drop=found.drop,
        agreement=1.0 if key == "float" else found.agreement,
        kl=found.kl,
        sqnr_db=None if found.sqnr_db == math.inf else found.sqnr_db,
        images=found.images,
        latency_ms=found.ms,
        ratio=found.ratio,
        bytes=found.bytes,
        size_ratio=found.size_ratio,
    )


def write_ladder(folder: Path, ladder: Ladder) -> None:
    """Into the folder of the climb, whole or not at all."""
    record = dataclasses.asdict(ladder) | {"task": ladder.task.as_dict()}
    write_text(folder / LADDER_FILE, json.dumps(record, indent=1) + "\n")


def read_ladder(folder: Path) -> Ladder | None:
    """What `write_ladder` wrote; None where nobody climbed."""
    path = folder / LADDER_FILE
    if not path.is_file():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    rungs = [RungResult(**with_score(row)) for row in stored["rungs"]]
    return Ladder(**{**stored, "rungs": rungs, "task": names_of(stored)})
