"""The listener to each epoch's score while a run trains: a search, which may end the run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# (name of the stage's checkpoint, epoch from 1, main metric of the task)
Listener = Callable[[str, int, float], None]
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


class Pruned(Exception):  # noqa: N818  no error: what Optuna calls it too
    """A trial ends early."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within, `listener` is called; it may raise Pruned."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def validated(stage: str, epoch: int, score: float) -> None:
    """An epoch is done, and measured."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(stage, epoch, score)
