"""Other people's code: what it raises becomes one line with the exception, their file and their line.

    with calling("data.source", "mypkg.data.load", source):
        splits = source(root, download, seed)

    error: data.source=mypkg.data.load: it raised (ValueError: no such split; mypkg/data.py:12)

`calling` stands where the code that is called is known. A model's forward, an observer or a check is called from deep
within, so the whole job is under `boundary`, which reads off the traceback whose code was running. What our own code
raises, called by nobody else's, is a defect and stays as it is.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

from qatkit_verify.errors import ConfigError, disk_error
from qatkit_verify.stopping import Stopped

OURS = ("qatkit", "qatkit_verify")
_OWN = tuple(f"{package}." for package in OURS)
_LIBRARIES = {
    "torch",
    "torchvision",
    "lightning",
    "hydra",
    "omegaconf",
    "PIL",
    "numpy",
    *sys.stdlib_module_names,
}
_LONGEST = 300  # characters of a message
_JOBS = ("qatkit.jobs.", "qatkit.run.")  # from here on it is the job, and no longer the script that starts it

Called = tuple[str, str]  # a key of the configuration, and the dotted path that it holds


class _Frame(NamedTuple):
    module: str
    file: str
    line: int

    def of(self, packages: Sequence[str]) -> bool:
        return self.module.partition(".")[0] in packages


@contextmanager
def calling(key: str, path: object, called: object = None) -> Iterator[None]:
    """Turns what is raised within into a ConfigError.

    Args:
        key: of the configuration, which named the code.
        path: the value of `key`.
        called: the object itself, where there is one; what one of ours raises is left as it is.
    """
    try:
        yield
    except (ConfigError, Stopped):
        raise
    except (Exception, SystemExit) as error:
        own = is_own(called) if called is not None else str(path).startswith(_OWN)
        if own or isinstance(error.__context__, KeyboardInterrupt):
            raise
        raise ConfigError(
            key, path, reason=f"it raised ({described(error, [_package(str(path))])})"
        ) from error


@contextmanager
def boundary(paths: Sequence[Called]) -> Iterator[None]:
    """The same for a whole job: for what was raised while code of others was running.

    Args:
        paths: the settings that name code.
    """
    try:
        yield
    except (ConfigError, Stopped):
        raise
    except (Exception, SystemExit) as error:
        if disk_error(error) is not None:
            raise
        foreign = [(key, path) for key, path in paths if not path.startswith(_OWN)]
        packages = [_package(path) for _, path in foreign]
        frames = _frames(error.__traceback__)
        start = next(
            (i for i, frame in enumerate(frames) if f"{frame.module}.".startswith(_JOBS)), len(frames)
        )
        theirs = [frame for frame in frames[start:] if _is_theirs(frame, packages)]
        named = _named(theirs, foreign) if theirs else _not_callable_so(error, foreign)
        if named is None:
            raise
        key, path = named
        raise ConfigError(key, path, reason=f"it raised ({described(error, packages)})") from error


def described(error: BaseException, packages: Sequence[str] = ()) -> str:
    """An exception's type and message, and the innermost place in code that is neither ours nor a library's.

    Where there is none, the innermost one that is not ours.

    Args:
        packages: that are a user's, wherever they are installed.
    """
    text = _in_a_line(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text}; {error.filename}:{error.lineno}"
    frames = [frame for frame in _frames(error.__traceback__) if not frame.of(OURS)]
    frame = next(
        (one for one in reversed(frames) if _is_theirs(one, packages)), frames[-1] if frames else None
    )
    return text if frame is None else f"{text}; {frame.file}:{frame.line}"


def _in_a_line(error: BaseException) -> str:
    """Returns an exception's type and message, and the notes that were added to it."""
    notes = [line for note in getattr(error, "__notes__", ()) for line in str(note).splitlines()]
    lines = traceback.format_exception_only(error)
    message = " ".join(lines[len(lines) - len(notes) - 1].split())[:_LONGEST].removesuffix(":")
    return ", ".join([message, *notes])


def check_call(key: str, path: str, called: Callable[..., Any], *args: str, **kwargs: Any) -> None:
    """Raises ConfigError for what can't be called with such arguments.

    Args:
        args: names of positional ones, as the message has them.
        kwargs: keyword arguments.
    """
    if not callable(called):
        raise ConfigError(key, path, f"a function or class, not {type(called).__name__}")
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = ", ".join([*args, *(f"{name}=..." for name in kwargs)])
        expected = f"a callable that takes ({wanted}), not {signature} ({error})"
        raise ConfigError(key, path, expected) from error


def is_own(called: object) -> bool:
    """Whether a function, a class or an object's class is one of ours."""
    module = getattr(called, "__module__", None) or type(called).__module__
    return f"{module}.".startswith(_OWN)


def _frames(trace: TracebackType | None) -> list[_Frame]:
    """Outermost first."""
    found = list[_Frame]()
    while trace is not None:
        code, names = trace.tb_frame.f_code, trace.tb_frame.f_globals
        found.append(_Frame(str(names.get("__name__", "")), code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _is_theirs(frame: _Frame, packages: Sequence[str]) -> bool:
    package = frame.module.partition(".")[0]
    if package in packages:
        return True
    generated = frame.file.startswith("<")  # of the import system, of torch.fx
    installed = "site-packages" in frame.file or "dist-packages" in frame.file
    return not (generated or installed or package in OURS or package in _LIBRARIES)


def _named(theirs: Sequence[_Frame], paths: Sequence[Called]) -> Called:
    """The setting that named the code: by the module of the outermost frame that is one's, else by its package."""
    modules = [(_module(path), key, path) for key, path in paths]
    for frame in theirs:
        for module, key, path in modules:
            if frame.module == module:
                return key, path
    for frame in theirs:
        for module, key, path in modules:
            if frame.of((module.partition(".")[0],)):
                return key, path
    return "code", theirs[-1].file


def _not_callable_so(error: BaseException, paths: Sequence[Called]) -> Called | None:
    """The setting whose class has a method of other arguments than it is called with: nothing of theirs ran yet."""
    told = re.match(r"([A-Za-z_]\w*)(\.\w+)*\(\) (takes|missing|got) ", str(error))
    if not isinstance(error, TypeError) or told is None:
        return None
    return next(((key, path) for key, path in paths if path.rpartition(".")[2] == told[1]), None)


def _module(path: str) -> str:
    return path.replace(":", ".").rpartition(".")[0]


def _package(path: str) -> str:
    return path.replace(":", ".").partition(".")[0]
