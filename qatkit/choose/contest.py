"""A contest: entrants become files, a judge assesses each one, and a rule decides which is kept, and why.

    Entrant(name, make) ── make() ──> the candidate ─── judge ──> Judged ─┬─ Contest   each against the best so far
                                                                          └─ decided   one of all that were judged
    resumed                a result that a killed run has found already is read again

A chooser is its entrants, its rule and its record. A judge is any function of what was made and its name:
`qatkit.choose.judge.Judge` where accuracy decides; its verdicts, and their noise, are in `qatkit.choose.verdict`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from qatkit.run.folder import main_process
from qatkit_verify.files import write_text

M = TypeVar("M")  # the candidate: a file, a graph, a configuration
V = TypeVar("V")  # the verdict on it
T = TypeVar("T")


@dataclass(frozen=True)
class Entrant(Generic[M]):
    """A candidate: its name, and the function that makes the file or graph to judge."""

    name: str
    make: Callable[[], M]


@dataclass(frozen=True)
class Judged(Generic[M, V]):
    """A candidate that was made, and the verdict on it; `seconds` covers both."""

    name: str
    made: M
    verdict: V
    seconds: float


@dataclass(frozen=True)
class Outcome(Generic[V]):
    """The result for one entrant. Without a verdict it was not tried, and `why` gives the reason."""

    name: str
    verdict: V | None = None
    seconds: float = 0.0
    kept: bool = False
    why: str = ""


def judged(entrant: Entrant[M], judge: Callable[[M, str], V]) -> Judged[M, V]:
    """Makes an entrant and returns the judge's verdict on it; the judge receives the candidate and its name."""
    start = time.monotonic()
    made = entrant.make()
    verdict = judge(made, entrant.name)
    return Judged(entrant.name, made, verdict, time.monotonic() - start)


class Contest(Generic[M, V]):
    """Compares entrants one by one, each with the one that is kept so far.

    Args:
        why_not: (verdict of a trial, verdict of what is kept) -> why the trial is not kept, "" if it is.
        won: the reason given for one that is kept.

    Attributes:
        kept: the candidate that the next trial has to beat; None before anything was kept.
        outcomes: the outcomes by name, in the order in which they came.
    """

    def __init__(self, why_not: Callable[[V, V], str], won: str = "") -> None:
        self.why_not, self.won = why_not, won
        self.kept: Judged[M, V] | None = None
        self.outcomes: dict[str, Outcome[V]] = {}

    def enter(self, trial: Judged[M, V]) -> Outcome[V]:
        """Compares a trial with what is kept, and keeps it if the rule says so; the first one is kept."""
        why = "" if self.kept is None else self.why_not(trial.verdict, self.kept.verdict)
        return self.reject(trial, why) if why else self.keep(trial, self.won)

    def keep(self, trial: Judged[M, V], why: str = "") -> Outcome[V]:
        """Keeps a trial without asking the rule."""
        self.kept = trial
        return self._noted(Outcome(trial.name, trial.verdict, trial.seconds, kept=True, why=why))

    def reject(self, trial: Judged[M, V], why: str) -> Outcome[V]:
        """Notes a trial that is not kept."""
        return self._noted(Outcome(trial.name, trial.verdict, trial.seconds, why=why))

    def leave_out(self, name: str, why: str) -> Outcome[V]:
        """Notes an entrant that is not tried."""
        return self._noted(Outcome(name, why=why))

    def yield_to(self, simpler: Judged[M, V], superfluous: Iterable[str], why: str) -> None:
        """Replaces the kept candidate by a simpler one, unless the kept one pays in comparison.

        Args:
            superfluous: names of earlier entrants that `simpler` does without, for the reason `why`.
        """
        kept = self.kept
        assert kept is not None
        outcome = self.outcomes[kept.name]
        self.outcomes[kept.name] = replace(outcome, seconds=outcome.seconds + simpler.seconds)
        if not self.why_not(kept.verdict, simpler.verdict):
            return
        self.kept = replace(simpler, name=kept.name)
        for name in superfluous:
            self.outcomes[name] = replace(self.outcomes[name], kept=False, why=why)

    def _noted(self, outcome: Outcome[V]) -> Outcome[V]:
        self.outcomes[outcome.name] = outcome
        return outcome


def decided(
    verdicts: Mapping[str, V], rule: Callable[[Mapping[str, V]], tuple[str, str]]
) -> dict[str, Outcome[V]]:
    """Returns the outcomes of a rule that chooses one of the judged candidates.

    Args:
        verdicts: the verdicts, by name.
        rule: returns the name of the candidate that is kept, and the reason.
    """
    kept, why = rule(verdicts)
    return {
        name: Outcome(name, verdict, kept=name == kept, why=why if name == kept else "")
        for name, verdict in verdicts.items()
    }


def resumed(
    path: Path,
    find: Callable[[], T],
    read: Callable[[Mapping[str, Any]], T],
    plain: Callable[[T], Mapping[str, Any]],
) -> T:
    """Returns the result that `path` holds from a killed run, or from the process that started this one.

    Where there is none, `find` finds it, and the main process writes it there.

    Args:
        read, plain: functions from and to plain containers.
    """
    if path.is_file():
        return read(json.loads(path.read_text(encoding="utf-8")))
    found = find()
    if main_process():
        write_text(path, json.dumps(plain(found)) + "\n")
    return found
