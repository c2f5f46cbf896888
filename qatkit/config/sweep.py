"""The outcomes of a sweep's runs, on this machine or others, for the sweep's exit status and its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run, or its state if it has not ended.

    Attributes:
        status: the exit status.
        folder: the folder of the run; "" if it has none.
        reason: one line that says why the status is not 0; "" if the run has reported the reason itself.
        number: the number of the run in the sweep; None outside of a sweep.
        overrides: the overrides as they were typed.
        sweep: the folder of the sweep; "" outside of a sweep.
        going: a description of the state of a run that has not ended; "" for one that has.
    """

    status: int
    folder: str = ""
    reason: str = ""
    number: int | None = None
    overrides: Sequence[str] = ()
    sweep: str = ""
    going: str = ""


_COLLECTED: ContextVar[list[Outcome] | None] = ContextVar("outcomes", default=None)


@contextmanager
def collecting() -> Iterator[list[Outcome]]:
    """Yields a list to which `add` appends within the context."""
    found: list[Outcome] = []
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def add(outcome: Outcome) -> None:
    """Records the outcome of a run; does nothing outside of `collecting`."""
    collected = _COLLECTED.get()
    if collected is not None:
        collected.append(outcome)
