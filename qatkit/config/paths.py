"""Settings that are paths: `~` written out, and what the file system refuses, as a mistake in a value."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qatkit.config.fields import Place, is_path, values_of
from qatkit_verify.errors import ConfigError

_OF_PLACES = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


def expand_home(settings: Any) -> None:
    """Writes out `~/` where a dataclass, or one in it, has a path: a shell does so only at the start of a word."""
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        if dataclasses.is_dataclass(value):
            expand_home(value)
        elif is_path(one) and isinstance(value, str) and value.startswith("~/"):
            setattr(settings, one.name, os.path.expanduser(value))


@contextmanager
def at_places(settings: Any) -> Iterator[None]:
    """What the file system refuses within, at a path that a dataclass holds, is a mistake in that value.

    Raises:
        ConfigError: no permission, a file in the place of a folder, a link that leads to itself, ...
    """
    try:
        yield
    except OSError as error:
        near = [] if error.errno not in _OF_PLACES else _places(settings, str(error.filename))
        if not near:
            raise
        key, value = max(near)[1:]
        raise ConfigError(key, value, f"a path that can be used ({error.strerror})") from error


def _places(settings: Any, path: str) -> list[tuple[int, str, str]]:
    """The paths that are `path`, above or below it: in how many names they agree, key, value."""
    there, found = Path(path).absolute().parts, list[tuple[int, str, str]]()
    for key, value, limit, _ in values_of(settings, ""):
        if isinstance(limit, Place) and isinstance(value, str):
            here = Path(value).absolute().parts
            shorter = min(len(here), len(there))
            if here[:shorter] == there[:shorter]:
                found.append((shorter, key, value))
    return found
