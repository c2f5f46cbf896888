"""Who is told of each epoch's accuracy while a run trains: a search, which may end the run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# (name of the stage's checkpoint, epoch from 1, top-1 in percent)
Listener = Callable[[str, int, float], None]
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


class Pruned(Exception):  # noqa: N818  no error: what Optuna calls it too
    """A trial ends early."""


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within, `listener` is told; it may raise Pruned."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def validated(stage: str, epoch: int, accuracy: float) -> None:
    """An epoch is done, and measured."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(stage, epoch, accuracy)
