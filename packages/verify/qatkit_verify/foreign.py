"""Turns an exception from other people's code into one line with the exception, their file and their line.

    with calling("data.source", "mypkg.data.load", source):
        splits = source(root, download, seed)

    error: data.source=mypkg.data.load: the code raised an exception (ValueError: no such split; mypkg/data.py:12)

`calling` is used where the called code is known. A model's forward, an observer or a check is called from
deep within, so the whole job runs under `boundary`, which finds in the traceback whose code was running. If
only our own code was running, the exception is a defect and is not converted.
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
_LONGEST = 300  # maximum number of characters of a message
_JOBS = ("qatkit.jobs.", "qatkit.run.")  # where the job begins, after the script that starts it

Called = tuple[str, str]  # a key of the configuration, and the dotted path that is its value


class _Frame(NamedTuple):
    module: str
    file: str
    line: int

    def of(self, packages: Sequence[str]) -> bool:
        return self.module.partition(".")[0] in packages


@contextmanager
def calling(key: str, path: object, called: object = None) -> Iterator[None]:
    """Turns an exception that is raised within the block into a ConfigError.

    Args:
        key: the key of the configuration that named the code.
        path: the value of `key`.
        called: the object itself; None: `path` tells whose code it is. Exceptions of our own code are not
            converted.
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
            key, path, reason=f"the code raised an exception ({described(error, [_package(str(path))])})"
        ) from error


@contextmanager
def boundary(paths: Sequence[Called]) -> Iterator[None]:
    """Turns an exception of a whole job into a ConfigError if other people's code was running.

    The same goes for code that does not accept the arguments of its call. Disk errors are not converted.

    Args:
        paths: the keys and values of the settings that name code.
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
        raise ConfigError(
            key, path, reason=f"the code raised an exception ({described(error, packages)})"
        ) from error


def described(error: BaseException, packages: Sequence[str] = ()) -> str:
    """Returns an exception's type and message, and where it was raised: "FILE:LINE".

    This is the innermost line of the traceback in code that is neither ours nor a library's, or else the
    innermost one that is not ours. For a SyntaxError, it is the line with the error. If there is no such line,
    only type and message are returned.

    Args:
        error: the exception.
        packages: names of packages that count as the user's even if they are installed with the libraries.
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
    """Raises ConfigError if an object cannot be called with the given arguments.

    Args:
        key: the key of the configuration that named the object.
        path: the value of `key`.
        called: the object.
        args: the names of the positional arguments, for the message.
        kwargs: the keyword arguments.
    """
    if not callable(called):
        raise ConfigError(key, path, f"a function or class, not {type(called).__name__}")
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = ", ".join([*args, *(f"{name}=..." for name in kwargs)])
        expected = f"a callable that accepts ({wanted}), not {signature} ({error})"
        raise ConfigError(key, path, expected) from error


def is_own(called: object) -> bool:
    """Returns whether a function, a class or an object's class is ours."""
    module = getattr(called, "__module__", None) or type(called).__module__
    return f"{module}.".startswith(_OWN)


def _frames(trace: TracebackType | None) -> list[_Frame]:
    """Returns the frames of a traceback, outermost first."""
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
    generated = frame.file.startswith("<")  # by the import system or torch.fx
    installed = "site-packages" in frame.file or "dist-packages" in frame.file
    return not (generated or installed or package in OURS or package in _LIBRARIES)


def _named(theirs: Sequence[_Frame], paths: Sequence[Called]) -> Called:
    """Returns the setting that names the code of the outermost frame for which there is such a setting.

    A setting with the frame's module is preferred to one with only its package. If no frame has a setting, it
    returns "code" and the file of the innermost frame.
    """
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
    """Returns the setting whose code was called with arguments that it does not accept, else None.

    Such code has not run yet, so it has no frame in the traceback.
    """
    told = re.match(r"([A-Za-z_]\w*)(\.\w+)*\(\) (takes|missing|got) ", str(error))
    if not isinstance(error, TypeError) or told is None:
        return None
    return next(((key, path) for key, path in paths if path.rpartition(".")[2] == told[1]), None)


def _module(path: str) -> str:
    return path.replace(":", ".").rpartition(".")[0]


def _package(path: str) -> str:
    return path.replace(":", ".").partition(".")[0]
