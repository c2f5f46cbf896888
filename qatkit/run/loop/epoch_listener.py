"""A listener for the score of each epoch during training: a search uses it and may end the run early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# (name of the stage's checkpoint, epoch from 1, main metric of the task)
Listener = Callable[[str, int, float], None]
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


class Pruned(Exception):  # noqa: N818  no error: what Optuna calls it too
    """An exception that a listener raises to end a trial early."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Sets the listener that is called after each epoch within the context; it may raise Pruned."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def validated(stage: str, epoch: int, score: float) -> None:
    """Reports the score of a finished epoch to the listener, if there is one."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(stage, epoch, score)
