"""The results of a rescue's rungs as plain data, for the final table and to resume a rescue that was killed."""

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
    """The result of one rung; the SQNR is None if the outputs equal float's.

    Attributes:
        name, title: the name of the rung, and a short description of it.
        folder: the folder of its run, relative to that of the climb; "" if it could not run.
        seconds: the duration of the rung.
        meets: whether the target is met.
        kept: whether the next rungs build on it.
        why: the reason for `kept`, or the reason why there are no figures.
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
        """Returns whether the rung has a measured file."""
        return self.agreement is not None


@dataclass(frozen=True)
class Ladder:
    """A climb through the rungs of a rescue.

    Attributes:
        rungs: the results of float and of the rungs, in order.
        chosen: the name of the rung whose file is delivered; "" while the climb continues.
        target: a description of the target.
        advice: one line of advice.
        task: the task of the figures.
    """

    rungs: Sequence[RungResult] = ()
    chosen: str = ""
    target: str = ""
    advice: str = ""
    task: TaskNames = NAMES


def rung_result(name: str, title: str, folder: str, report: dict[str, Any], key: str = "int8") -> RungResult:
    """Returns a rung with the figures of a finished run's report.json.

    Args:
        name, title, folder: see `RungResult`.
        report: the content of report.json.
        key: "int8" for the file of the run, or "float" for the float file.
    """
    found = figures_of(report, key)
    decibel = None if found.sqnr_db == math.inf else found.sqnr_db
    near = {"agreement": 1.0 if key == "float" else found.agreement, "sqnr_db": decibel}
    return RungResult(name, title, folder, **(vars(found) | near))


def write_ladder(folder: Path, ladder: Ladder) -> None:
    """Writes the ladder into the folder of the climb in an atomic step."""
    record = dataclasses.asdict(ladder) | {"task": ladder.task.as_dict()}
    write_text(folder / LADDER_FILE, json.dumps(record, indent=1) + "\n")


def read_ladder(folder: Path) -> Ladder | None:
    """Returns the ladder that `write_ladder` has written; None if there is none."""
    path = folder / LADDER_FILE
    if not path.is_file():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    rungs = [RungResult(**with_score(row)) for row in stored["rungs"]]
    return Ladder(**{**stored, "rungs": rungs, "task": names_of(stored)})
