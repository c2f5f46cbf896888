"""What is said where a command does not end well, in one line on standard error, and its exit status.

`from_checkpoint`, as `qatkit.cli.command_line.main` has it, says whether the same command goes on or begins again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError

_AGAIN = {False: "with resume=auto continues", True: "begins again"}


def ended_by(error: Exception, from_checkpoint: bool) -> int:
    """The line of a mistake, or of a signal, of which a module in C that is being imported makes an exception."""
    number = stopping.wanted()
    if number is not None:
        return interrupted(stopping.Stopped(number), from_checkpoint)
    if not isinstance(error, ConfigError):
        raise error
    return complain(error)


def complain(error: ConfigError, *, debug: bool = False) -> int:
    """The one line, with the traceback before it where that is asked for."""
    if debug:
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)
    return 2


def no_room(full: OSError, from_checkpoint: bool) -> int:
    """Says which file does not fit on its disk."""
    file = full.filename or f"a temporary file in {tempfile.gettempdir()}"
    again = _AGAIN[from_checkpoint]
    print(f"error: {file}: {full.strerror}: make room there, then the same command {again}", file=sys.stderr)
    return 1


def interrupted(stop: stopping.Stopped, from_checkpoint: bool) -> int:
    """Says how to go on; of several ranks the first one speaks."""
    again = stop.again or f"the same command {_AGAIN[from_checkpoint]}"
    if all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")):
        print(f"interrupted {stop.where}".rstrip() + f": {again}", file=sys.stderr, flush=True)
    return int(stop.code or 0)
