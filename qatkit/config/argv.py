"""The command line as it was typed, for lines that say what to type next."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

_TYPED: ContextVar[tuple[str, ...] | None] = ContextVar("typed", default=None)
# What another run must not share with the one before.
_OWN = ("output_dir", "resume")


@contextlib.contextmanager
def typing(overrides: Sequence[str] | None) -> Iterator[None]:
    """While a job runs that was started by "train.py OVERRIDES..."; None: by nothing that could be typed again."""
    token = _TYPED.set(None if overrides is None else tuple(overrides))
    try:
        yield
    finally:
        _TYPED.reset(token)


def command_with(*overrides: str, without: Sequence[str] = ()) -> str:
    """The command again, with further overrides in place of those of the same keys, `without` some keys.

    "" where no command line is known: a library call, or a job that does not start from a recipe.
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
