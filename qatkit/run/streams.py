r"""Makes the standard streams of a process safe to write to, even if they are closed or a pipe ends early.

closed descriptor 0, 1, 2   ──> /dev/null; otherwise the first file that is opened would get its number
a pipe that nobody reads    ──> /dev/null from then on: a training run does not end with `| head -1`
ascii, Latin-1              ──> characters that they lack as \x.. or \u....
qatkit's own warnings       ──> one line each, without file and line number
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from qatkit.warning import QatkitWarning

_PACKAGE, _PYTHONS_OWN = Path(__file__).parents[1], warnings.formatwarning


def prepare() -> None:
    """Prepares the streams of this process, once, before anything is written or opened."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # opens with the lowest free number
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # Python found it closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  for the process's life
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _patient(stream))
    warnings.formatwarning = _plain_warning


def _plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats qatkit's own warnings, and those of libraries about its calls, as one line for users."""
    if issubclass(category, QatkitWarning) or Path(filename).is_relative_to(_PACKAGE):
        return f"warning: {message}\n"
    return _PYTHONS_OWN(message, category, filename, lineno, line)


def _patient(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    raw = _Descriptor(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=stream.line_buffering
    )


class _Descriptor(io.FileIO):
    """A stream that switches to /dev/null once its reader (a program behind a pipe, a terminal) is gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)
