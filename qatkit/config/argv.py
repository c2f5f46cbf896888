"""The command line as it was typed, for messages that tell what to type next."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

_TYPED: ContextVar[tuple[str, ...] | None] = ContextVar("typed", default=None)
# Keys that another run must not share with the one before.
_OWN = ("output_dir", "resume")


@contextlib.contextmanager
def typing(overrides: Sequence[str] | None) -> Iterator[None]:
    """Sets the typed command line while a job runs that "train.py OVERRIDES..." started.

    Args:
        overrides: None if nothing that could be typed again started the job.
    """
    token = _TYPED.set(None if overrides is None else tuple(overrides))
    try:
        yield
    finally:
        _TYPED.reset(token)


def command_with(*overrides: str, without: Sequence[str] = ()) -> str:
    """Returns the command line again, with further overrides that replace those of the same keys and `without`
    some keys.

    The result is "" if no command line is known: in a library call, or a job that does not start from a
    recipe.
    """
    typed = _TYPED.get()
    if typed is None:
        return ""
    replaced = {_key(one) for one in overrides} | {*_OWN, *without}
    kept = [one for one in typed if _key(one) not in replaced]
    installed = Path(sys.argv[0]).name == "qatkit-train"
    command = "qatkit-train" if installed else "uv run train.py"
    return " ".join([command, *map(shlex.quote, (*kept, *overrides))])


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
