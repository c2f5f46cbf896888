"""Settings that are paths: expands `~`, and reports errors of the file system as errors of a setting."""

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
    """Expands `~/` in the paths of a dataclass and of those in it: a shell does so only at the start of a word."""
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        if dataclasses.is_dataclass(value):
            expand_home(value)
        elif is_path(one) and isinstance(value, str) and value.startswith("~/"):
            setattr(settings, one.name, os.path.expanduser(value))


@contextmanager
def at_places(settings: Any) -> Iterator[None]:
    """Reports an error of the file system at a path of a dataclass as an error of that setting.

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
    """Returns the paths that are `path`, or above or below it: number of names in common, key, value."""
    there, found = Path(path).absolute().parts, list[tuple[int, str, str]]()
    for key, value, limit, _ in values_of(settings, ""):
        if isinstance(limit, Place) and isinstance(value, str):
            here = Path(value).absolute().parts
            shorter = min(len(here), len(there))
            if here[:shorter] == there[:shorter]:
                found.append((shorter, key, value))
    return found
