"""What each rung came to, as plain data: the table at the end, and the file by which a killed climb goes on."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qatkit.records.figures import Figures, figures_of
from qatkit.records.run_files import LADDER_FILE
from qatkit.records.scores import with_score
from qatkit_verify.classification import NAMES, names_of
from qatkit_verify.files import write_text
from qatkit_verify.records import TaskNames


@dataclass(frozen=True)
class RungResult(Figures):
    """One rung; of outputs that equal float's there are no decibels.

    Attributes:
        name, title: of the rung; the title says what is done, in words.
        folder: of its run, relative to that of the climb; "" of one that made no file.
        seconds: that the rung took.
        meets: whether the target is met.
        kept: whether the rungs behind build on it.
        why: what decided, in words.
    """

    name: str
    title: str
    folder: str = ""
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
    decibel = None if found.sqnr_db == math.inf else found.sqnr_db
    near = {"agreement": 1.0 if key == "float" else found.agreement, "sqnr_db": decibel}
    return RungResult(name, title, folder, **(vars(found) | near))


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
