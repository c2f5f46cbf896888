"""A contest: candidates are made and judged one by one, and a rule decides which one is kept, and why.

    Entrant(name, make) ── make() ──> the candidate ─── judge ──> Judged ─┬─ Contest   each against the best so far
                                                                          └─ decided   one of all that were judged
    resumed                reads a result that a killed run has already found, or computes it

The module that makes a choice defines the entrants, the rule, and how the result is recorded. A judge is any
function of a candidate and its name. If accuracy decides, it is `qatkit.choose.judge.Judge`, whose verdicts
and their noise are in `qatkit.choose.verdict`.
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

M = TypeVar("M")  # the candidate: a file, a graph or a configuration
V = TypeVar("V")  # the verdict on it
T = TypeVar("T")


@dataclass(frozen=True)
class Entrant(Generic[M]):
    """A candidate: its name, and the function that creates the file or graph to judge."""

    name: str
    make: Callable[[], M]


@dataclass(frozen=True)
class Judged(Generic[M, V]):
    """A candidate that was created, the verdict on it, and the seconds that creating and judging it took."""

    name: str
    made: M
    verdict: V
    seconds: float


@dataclass(frozen=True)
class Outcome(Generic[V]):
    """The result for one entrant. An entrant without a verdict was not tried; `why` gives the reason."""

    name: str
    verdict: V | None = None
    seconds: float = 0.0
    kept: bool = False
    why: str = ""


def judged(entrant: Entrant[M], judge: Callable[[M, str], V]) -> Judged[M, V]:
    """Creates the candidate of an entrant, passes it and its name to the judge, and returns it with the verdict."""
    start = time.monotonic()
    made = entrant.make()
    verdict = judge(made, entrant.name)
    return Judged(entrant.name, made, verdict, time.monotonic() - start)


class Contest(Generic[M, V]):
    """Compares entrants one by one with the candidate that is kept so far.

    Args:
        why_not: a function of the verdicts on a trial and on the kept candidate. It returns the reason why
            the trial is not kept, or "" if it is kept.
        won: the reason that is recorded for a kept trial.

    Attributes:
        kept: the candidate that the next trial has to beat; None before the first one is kept.
        outcomes: the outcomes by name, in the order of the trials.
    """

    def __init__(self, why_not: Callable[[V, V], str], won: str = "") -> None:
        self.why_not, self.won = why_not, won
        self.kept: Judged[M, V] | None = None
        self.outcomes: dict[str, Outcome[V]] = {}

    def enter(self, trial: Judged[M, V]) -> Outcome[V]:
        """Compares a trial with the kept candidate, and keeps one of them by the rule; the first trial is kept."""
        why = "" if self.kept is None else self.why_not(trial.verdict, self.kept.verdict)
        return self.reject(trial, why) if why else self.keep(trial, self.won)

    def keep(self, trial: Judged[M, V], why: str = "") -> Outcome[V]:
        """Keeps a trial without applying the rule."""
        self.kept = trial
        return self._noted(Outcome(trial.name, trial.verdict, trial.seconds, kept=True, why=why))

    def reject(self, trial: Judged[M, V], why: str) -> Outcome[V]:
        """Records a trial that is not kept."""
        return self._noted(Outcome(trial.name, trial.verdict, trial.seconds, why=why))

    def leave_out(self, name: str, why: str) -> Outcome[V]:
        """Records an entrant that is not tried."""
        return self._noted(Outcome(name, why=why))

    def yield_to(self, simpler: Judged[M, V], superfluous: Iterable[str], why: str) -> None:
        """Replaces the kept candidate by a simpler one, unless the kept one is better by the rule.

        Args:
            simpler: the simpler candidate.
            superfluous: the names of earlier entrants that `simpler` does not use.
            why: the reason that is recorded for not keeping these entrants.
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
        verdicts: the verdicts by name.
        rule: a function that returns the name of the candidate to keep, and the reason.
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
    """Returns the result in the file `path`, which a killed run or the process that started this one has written.

    Without such a file, `find` computes the result, and the main process writes it.

    Args:
        path: the path of the file.
        find: a function that computes the result.
        read, plain: functions that convert the result from and to plain containers.
    """
    if path.is_file():
        return read(json.loads(path.read_text(encoding="utf-8")))
    found = find()
    if main_process():
        write_text(path, json.dumps(plain(found)) + "\n")
    return found
