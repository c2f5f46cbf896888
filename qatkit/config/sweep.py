"""What each run of a sweep came to, wherever it ran: the exit status of the whole, and the rows of its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Attributes:
        status: of exit.
        folder: of the run; "" where it came to none.
        reason: in one line, why the status is not 0; "" where the run has reported it itself.
        number: in the sweep; None outside of one.
        overrides: as typed.
        sweep: the folder of the sweep; "" outside of one.
        going: of a run that has not ended: how it stands, in words.
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
    """Within, `add` fills the list."""
    found: list[Outcome] = []
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def add(outcome: Outcome) -> None:
    """A run has ended."""
    collected = _COLLECTED.get()
    if collected is not None:
        collected.append(outcome)
