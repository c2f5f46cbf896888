"""Hydra's parser of command-line flags, for all versions of Python.

Hydra 1.3 gives one flag a help that becomes a text only when it is printed. Since Python 3.14, argparse checks each
help when a flag is added and accepts only texts, so that Hydra fails before it reads the command line
(https://github.com/facebookresearch/hydra/issues/3121).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

import hydra  # noqa: F401  # loads the module hydra.main, whose name the function of this name hides
from hydra._internal.utils import get_args_parser

_CHECK = "_check_help"  # the method of argparse.ArgumentParser, as of Python 3.14


def flags_parser() -> argparse.ArgumentParser:
    """Returns the parser that `hydra.main` itself uses."""
    with _help_unchecked():
        return get_args_parser()


def support_python_314() -> None:
    """Lets `hydra.main` build its parser on Python 3.14 and newer."""
    if hasattr(argparse.ArgumentParser, _CHECK):
        sys.modules["hydra.main"].get_args_parser = flags_parser  # type: ignore[attr-defined]


@contextlib.contextmanager
def _help_unchecked() -> Iterator[None]:
    """Turns argparse's check of help texts off within the context, on versions of Python that have it."""
    check = getattr(argparse.ArgumentParser, _CHECK, None)
    if check is None:
        yield
        return
    setattr(argparse.ArgumentParser, _CHECK, lambda parser, action: None)
    try:
        yield
    finally:
        setattr(argparse.ArgumentParser, _CHECK, check)
