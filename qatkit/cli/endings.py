"""The messages and exit statuses of a command that fails or is stopped: one line on standard error.

`from_checkpoint` (see `qatkit.cli.command_line.main`) decides whether the same command resumes or starts
again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError

_AGAIN = {
    False: "run the same command with resume=auto to continue",
    True: "run the same command to start again",
}


def ended_by(error: Exception, from_checkpoint: bool) -> int:
    """Reports a user's mistake or a signal, and returns the exit status.

    A signal during the import of a C module may appear as another exception.

    Raises:
        Exception: `error` itself, if it is neither.
    """
    number = stopping.wanted()
    if number is not None:
        return interrupted(stopping.Stopped(number), from_checkpoint)
    if not isinstance(error, ConfigError):
        raise error
    return complain(error)


def complain(error: ConfigError, *, debug: bool = False) -> int:
    """Prints the error as one line, after the traceback if `debug` is set, and returns the exit status 2."""
    if debug:
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)
    return 2


def no_room(full: OSError, from_checkpoint: bool) -> int:
    """Prints which file does not fit on its disk, and returns the exit status 1."""
    file = full.filename or f"a temporary file in {tempfile.gettempdir()}"
    again = _AGAIN[from_checkpoint]
    print(f"error: {file}: {full.strerror}: free some space, then {again}", file=sys.stderr)
    return 1


def interrupted(stop: stopping.Stopped, from_checkpoint: bool) -> int:
    """Prints how to continue, only on the first of several ranks, and returns the exit status."""
    again = stop.again or _AGAIN[from_checkpoint]
    if all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")):
        print(f"interrupted {stop.where}".rstrip() + f": {again}", file=sys.stderr, flush=True)
    return int(stop.code or 0)
