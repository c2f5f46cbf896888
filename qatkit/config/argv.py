"""The command line as it was typed, for messages that suggest the next command."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from qatkit.config.quoting import quoted

TRAIN, EXPORT = "train", "export"  # names of the programs
# Keys that a suggested command must not repeat.
_OWN = ("output_dir", "resume")
_PLAIN = re.compile(r"[\w./:@%+-]+")  # values that Hydra reads unquoted


@dataclass(frozen=True)
class _Typed:
    """A typed command line.

    Attributes:
        program: the program, `TRAIN` or `EXPORT`.
        overrides: the overrides as they were typed.
        flags: the flags of Hydra, such as --config-dir.
        swept: whether the job is one run of a sweep.
    """

    program: str
    overrides: tuple[str, ...]
    flags: tuple[str, ...] = ()
    swept: bool = False


_TYPED: ContextVar[_Typed | None] = ContextVar("typed", default=None)
_SET: ContextVar[frozenset[str] | None] = ContextVar("set", default=None)
_ALIKE: ContextVar[bool] = ContextVar("alike", default=False)


@contextlib.contextmanager
def typing(
    overrides: Sequence[str] | None,
    program: str = TRAIN,
    flags: Sequence[str] = (),
    *,
    swept: bool = False,
) -> Iterator[None]:
    """Sets the command line that started the job ("train.py OVERRIDES...") within the context.

    Args:
        overrides: the typed overrides; None if the job was not started by a command line.
        program: the program that started the job, `TRAIN` or `EXPORT`.
        flags: the flags typed in addition to the overrides.
        swept: whether the job is one run of a sweep.
    """
    typed = None if overrides is None else _Typed(program, tuple(overrides), tuple(flags), swept)
    token = _TYPED.set(typed)
    try:
        with contextlib.nullcontext() if overrides is None else setting(overrides):
            yield
    finally:
        _TYPED.reset(token)


@contextlib.contextmanager
def setting(overrides: Sequence[str]) -> Iterator[None]:
    """Sets the overrides that a user has chosen, on a command line or in a call, within the context.

    They also apply to the parts of a larger job, which have no command line of their own.
    """
    token = _SET.set(frozenset(map(_key, overrides)))
    try:
        yield
    finally:
        _SET.reset(token)


def left_open(key: str) -> bool:
    """Returns whether the user's overrides are known and do not set the key, so that a default may be adapted."""
    chosen = _SET.get()
    return chosen is not None and key not in chosen


@contextlib.contextmanager
def one_of_many() -> Iterator[None]:
    """Marks the jobs in the context as parts of a larger job, which has already printed its plan.

    Such parts are the rungs of a rescue, the trials of a search, and all runs of a sweep except the first.
    """
    token = _ALIKE.set(True)
    try:
        yield
    finally:
        _ALIKE.reset(token)


def announces_plan() -> bool:
    """Returns whether a job prints its plan: not within `one_of_many`."""
    return not _ALIKE.get()


def command_with(*overrides: str, without: Sequence[str] = ()) -> str:
    """Returns the typed command line of train.py with changed overrides.

    The result is "" in a library call, and for a command line of another program.

    Args:
        *overrides: additional overrides, which replace typed ones with the same key.
        without: the keys to leave out.
    """
    typed = _TYPED.get()
    return again(*overrides, without=without) if typed is not None and typed.program == TRAIN else ""


def again(*overrides: str, without: Sequence[str] = ()) -> str:
    """Returns the typed command line of either program, changed as in `command_with`; "" in a library call."""
    typed = _TYPED.get()
    if typed is None:
        return ""
    # An addition to a mapping, such as +backend.overrides={...}, does not replace earlier ones.
    replaced = {_key(one) for one in overrides if not one.startswith("+")} | {*_OWN, *without}
    kept = [one for one in typed.overrides if _key(one) not in replaced]
    return command(typed.program, *kept, *overrides, *typed.flags)


def typed_value(key: str) -> str | None:
    """Returns the value that was typed last for a key; None if the key was not typed."""
    typed = _TYPED.get()
    given = [one for one in typed.overrides if _key(one) == key] if typed is not None else []
    return given[-1].partition("=")[2] if given else None


def typed_like(key: str) -> tuple[str, ...]:
    """Returns the overrides that were typed for a key or, if it names a group, for the keys in that group."""
    typed = _TYPED.get()
    given = () if typed is None else typed.overrides
    return tuple(one for one in given if _key(one) == key or _key(one).startswith(f"{key}."))


def proposes() -> bool:
    """Returns whether a job suggests further commands: it was started from a command line, and not by a sweep."""
    typed = _TYPED.get()
    return typed is not None and not typed.swept


def command(program: str, *words: str) -> str:
    """Returns the command line, quoted for a shell, that starts a program as the current one was started.

    An installed `qatkit-train` suggests installed commands; `uv run train.py` suggests `uv run ...`.

    Args:
        program: `TRAIN`, `EXPORT`, or an installed command, such as "qatkit compare".
        *words: the arguments of the program.
    """
    script = Path(sys.argv[0]).name
    installed = script.startswith("qatkit")
    if program in (TRAIN, EXPORT):
        start = [f"qatkit-{program}"] if installed else ["uv", "run", f"{program}.py"]
    else:
        start = [*([] if installed else ["uv", "run"]), *program.split()]
    return shlex.join([*start, *words])


def override(key: str, value: object) -> str:
    """Returns the text of an override, quoted so that Hydra reads the value unchanged."""
    text = str(value)
    return f"{key}={text}" if _PLAIN.fullmatch(text) else f"{key}={quoted(text)}"


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
