"""Announces the stages of a run in a table at its start, which is also part of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qatkit.config.argv import announces_plan
from qatkit.records.plan import Planned, lines
from qatkit.run.folder import Run, say
from qatkit.run.pace import Unknown
from qatkit.run.timing import undisturbed

_TITLE = "plan, with times estimated from a few samples on this machine:"
_ROUGH = "plan, with rough times, since other programs use this machine's processor at the moment:"


def stage(name: str, about: str, estimate: Callable[[], float] | str, *, done: bool = False) -> Planned:
    """Returns a row of the plan.

    Args:
        name: the name of the stage, as in `Run.stage`.
        about: a description of the stage.
        estimate: a function that returns the seconds (not called if the stage is done), or the reason for no
            estimate.
        done: whether an earlier attempt has finished the stage.
    """
    if done:
        return Planned(name, about, done=True)
    if isinstance(estimate, str):
        return Planned(name, about, why=estimate)
    try:
        with undisturbed():
            return Planned(name, about, estimate())
    except Unknown as error:
        return Planned(name, about, why=str(error))


def announce(run: Run, plan: Iterable[Planned], *, crowded: bool = False) -> None:
    """Keeps the plan for the report, and prints it unless the job is part of a larger one (`one_of_many`).

    Args:
        run: the run at its start.
        plan: the stages in order.
        crowded: whether other programs used the processor during the measurements.
    """
    run.plan = tuple(plan)
    if run.plan and announces_plan():
        for line in lines(_ROUGH if crowded else _TITLE, run.plan):
            say(line)
