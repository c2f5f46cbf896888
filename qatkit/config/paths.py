"""Settings that are paths: expands `~`, and reports file system errors as errors of a setting."""

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
    """Expands `~/` at the start of each path in a dataclass and its inner dataclasses.

    A shell does not expand it in KEY=~/PATH, since `~` is not at the start of the word.
    """
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        if dataclasses.is_dataclass(value):
            expand_home(value)
        elif is_path(one) and isinstance(value, str) and value.startswith("~/"):
            setattr(settings, one.name, os.path.expanduser(value))


@contextmanager
def at_places(settings: Any) -> Iterator[None]:
    """Reports file system errors within the context as errors of the setting whose path is affected.

    Raises:
        ConfigError: a path cannot be used, for example because permission is missing, or because a file is where a
            folder should be.
        OSError: the error is of another kind, such as a full disk, or its path belongs to no setting.
    """
    try:
        yield
    except OSError as error:
        near = [] if error.errno not in _OF_PLACES else _places(settings, str(error.filename))
        if not near:
            raise
        key, value = max(near)[1:]
        raise ConfigError(key, value, reason=f"the path cannot be used ({error.strerror})") from error


def _places(settings: Any, path: str) -> list[tuple[int, str, str]]:
    """Returns (number of common path parts, key, value) of each setting whose path is `path`, above it or below it."""
    there, found = Path(path).absolute().parts, list[tuple[int, str, str]]()
    for key, value, limit, _ in values_of(settings, ""):
        if isinstance(limit, Place) and isinstance(value, str):
            here = Path(value).absolute().parts
            shorter = min(len(here), len(there))
            if here[:shorter] == there[:shorter]:
                found.append((shorter, key, value))
    return found
