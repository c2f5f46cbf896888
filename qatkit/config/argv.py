"""The command line as it was typed, for messages that tell what to type next."""

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

TRAIN, EXPORT = "train", "export"  # programs
# Keys that another run must not share with the one before.
_OWN = ("output_dir", "resume")
_PLAIN = re.compile(r"[\w./:@%+-]+")  # values that Hydra reads unquoted


@dataclass(frozen=True)
class _Typed:
    """A command line.

    Attributes:
        program: `TRAIN` or `EXPORT`.
        overrides: the overrides as typed.
        flags: flags of Hydra, such as --config-dir.
        swept: whether it belongs to a sweep.
    """

    program: str
    overrides: tuple[str, ...]
    flags: tuple[str, ...] = ()
    swept: bool = False


_TYPED: ContextVar[_Typed | None] = ContextVar("typed", default=None)
_ALIKE: ContextVar[bool] = ContextVar("alike", default=False)


@contextlib.contextmanager
def typing(
    overrides: Sequence[str] | None,
    program: str = TRAIN,
    flags: Sequence[str] = (),
    *,
    swept: bool = False,
) -> Iterator[None]:
    """Sets the typed command line while a job runs that "train.py OVERRIDES..." started.

    Args:
        overrides: None if nothing that could be typed again started the job.
        program: `EXPORT` if export.py started it.
        flags: typed in addition to overrides.
        swept: whether the job is one of a sweep.
    """
    typed = None if overrides is None else _Typed(program, tuple(overrides), tuple(flags), swept)
    token = _TYPED.set(typed)
    try:
        yield
    finally:
        _TYPED.reset(token)


@contextlib.contextmanager
def one_of_many() -> Iterator[None]:
    """Marks the jobs within as parts of a whole that was announced: a rung, a trial, a later run of a sweep."""
    token = _ALIKE.set(True)
    try:
        yield
    finally:
        _ALIKE.reset(token)


def announces_plan() -> bool:
    """Returns whether a job prints its plan; one of many that was announced does not."""
    return not _ALIKE.get()


def command_with(*overrides: str, without: Sequence[str] = ()) -> str:
    """Returns the command line again, with further overrides that replace those of the same keys and `without`
    some keys.

    The result is "" if no command line is known, or it is not one of train.py: in a library call, or a job that
    does not start from a recipe.
    """
    typed = _TYPED.get()
    return again(*overrides, without=without) if typed is not None and typed.program == TRAIN else ""


def again(*overrides: str, without: Sequence[str] = ()) -> str:
    """Returns the command line of either program again, as `command_with` does; "" if none is known."""
    typed = _TYPED.get()
    if typed is None:
        return ""
    # An addition to a mapping, +backend.overrides={...}, leaves earlier ones in place.
    replaced = {_key(one) for one in overrides if not one.startswith("+")} | {*_OWN, *without}
    kept = [one for one in typed.overrides if _key(one) not in replaced]
    return command(typed.program, *kept, *overrides, *typed.flags)


def typed_value(key: str) -> str | None:
    """Returns the value that was typed for a key, the last of several; None if it was not typed."""
    typed = _TYPED.get()
    given = [one for one in typed.overrides if _key(one) == key] if typed is not None else []
    return given[-1].partition("=")[2] if given else None


def typed_like(key: str) -> tuple[str, ...]:
    """Returns the overrides that were typed for a key or for those of a group."""
    typed = _TYPED.get()
    given = () if typed is None else typed.overrides
    return tuple(one for one in given if _key(one) == key or _key(one).startswith(f"{key}."))


def proposes() -> bool:
    """Returns whether a job proposes further commands: one line was typed for it alone."""
    typed = _TYPED.get()
    return typed is not None and not typed.swept


def command(program: str, *words: str) -> str:
    """Returns a command of this installation, quoted for a shell: train, export, compare, or a script of ours."""
    script = Path(sys.argv[0]).name
    installed = script.startswith("qatkit")
    if program in (TRAIN, EXPORT):
        start = [f"qatkit-{program}"] if installed else ["uv", "run", f"{program}.py"]
    else:
        start = [*([] if installed else ["uv", "run"]), *program.split()]
    return shlex.join([*start, *words])


def override(key: str, value: object) -> str:
    """Returns an override whose value Hydra reads back unchanged."""
    text = str(value)
    return f"{key}={text}" if _PLAIN.fullmatch(text) else f"{key}={quoted(text)}"


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
