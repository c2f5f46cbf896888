"""The plan of a run as plain data: its stages with estimated and, later, measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qatkit_verify.table import drawn

_HEAD = ("stage", "what it does", "time")
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0


@dataclass(frozen=True)
class Planned:
    """A stage of a run.

    Attributes:
        stage: the name of the stage, as in the report's timings.
        about: a short description.
        estimate: the estimated seconds; None if there is no estimate.
        why: the reason why there is no estimate.
        done: whether an earlier attempt of this run has finished it.
        seconds: the measured seconds; None before the stage has ended.
    """

    stage: str
    about: str
    estimate: float | None = None
    why: str = ""
    done: bool = False
    seconds: float | None = None

    @property
    def title(self) -> str:
        """The displayed name of the stage."""
        return self.stage.replace("_", " ")


@dataclass(frozen=True)
class NextStep:
    """A suggested command after a run.

    Attributes:
        command: the command as it is typed.
        why: a short description of what it does or shows.
    """

    command: str
    why: str


def with_seconds(plan: Sequence[Planned], timings: Mapping[str, float]) -> tuple[Planned, ...]:
    """Returns the plan with the measured times; a stage of an earlier attempt has none."""
    return tuple(one if one.done else replace(one, seconds=timings.get(one.stage)) for one in plan)


def lines(title: str, plan: Sequence[Planned]) -> list[str]:
    """Returns the plan as a table below its title, with the total time."""
    rows = [_HEAD, *((one.title, one.about, _time(one)) for one in plan), ("total", "", _total(plan))]
    return [title, *(f"  {line}" for line in drawn(rows))]


def duration(seconds: float) -> str:
    """Returns a duration in seconds as text with two significant digits, in a suitable unit."""
    if seconds < 1:
        return "< 1 s"
    for limit, unit, name in ((100, 1.0, "s"), (100 * _MINUTE, _MINUTE, "min"), (2 * _DAY, _HOUR, "h")):
        if seconds < limit:
            return _digits(seconds / unit, name)
    return _digits(seconds / _DAY, "days")


def _digits(value: float, unit: str) -> str:
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"


def _time(one: Planned) -> str:
    if one.done:
        return "done"
    if one.estimate is None:
        return "not estimated" + (f" ({one.why})" if one.why else "")
    return duration(one.estimate)


def _total(plan: Sequence[Planned]) -> str:
    left = [one for one in plan if not one.done]
    known = [one.estimate for one in left if one.estimate is not None]
    unknown = [one.title for one in left if one.estimate is None]
    if not left:
        return "done"
    if not known:
        return "not estimated"
    total = duration(sum(known))
    return f"{total}, plus {', '.join(unknown)}" if unknown else total
