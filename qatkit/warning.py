"""Warnings for users of qatkit, which name the line of their own code: it called qatkit, directly or not.

The command line prints only their text (`qatkit.run.streams`).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parent
_BETWEEN = ("contextlib", "torch", "lightning")  # they call qatkit for the user: decorators, modules, hooks


class QatkitWarning(UserWarning):
    """A warning of qatkit, by which scripts can filter."""


def warn(text: str) -> None:
    """Warns at the line of the user's code that called qatkit.

    No number of frames is known in advance, and `skip_file_prefixes` of Python 3.12 would stop at a library that
    calls qatkit, such as Lightning at a hook.
    """
    place = frame = sys._getframe()
    while frame.f_back is not None:
        if Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
            place = frame.f_back
        frame = frame.f_back
    while place.f_back is not None and _name(place).partition(".")[0] in _BETWEEN:
        place = place.f_back
    registry = place.f_globals.setdefault("__warningregistry__", {})
    file, line = place.f_code.co_filename, place.f_lineno
    warnings.warn_explicit(text, QatkitWarning, file, line, module=_name(place), registry=registry)


def _name(frame: FrameType) -> str:
    """Returns the name of the module whose code the frame runs."""
    return str(frame.f_globals.get("__name__", ""))
