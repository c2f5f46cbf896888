"""The listener to each epoch's score during training: a search, which may end the run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# (name of the stage's checkpoint, epoch from 1, main metric of the task)
Listener = Callable[[str, int, float], None]
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


class Pruned(Exception):  # noqa: N818  no error: what Optuna calls it too
    """Ends a trial early."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Calls `listener` for each epoch within the context; it may raise Pruned."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def validated(stage: str, epoch: int, score: float) -> None:
    """Reports a finished and measured epoch to the listener, if there is one."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(stage, epoch, score)
