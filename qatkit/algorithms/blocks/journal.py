"""Stores the finished blocks of a long algorithm in files: a killed run continues with the next block.

    with working(progress=True, seed=0, file=folder / "adaround.partial"):
        module.correct(batches, [algorithm])

Each finished block has a file (adaround.0.partial, ...) with its result and a key: a fingerprint of the
graph, the ranges, the settings and the images. A damaged file, or one with another key, is ignored with a
warning; its block and all later ones are computed again. The caller (`qatkit.jobs.calibrate`) removes the
files once a checkpoint holds the result.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qatkit.encryption.vault import readable, secret
from qatkit.warning import warn

Found = dict[str, Tensor]  # the result of a block


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Work:
    """Settings for the execution of a long algorithm.

    Attributes:
        progress: whether a progress bar is shown.
        seed: the seed of random choices, such as the order of the images.
        file: the path from which the files of finished blocks get their names; None: no files.
        between: a function that is called after each block, to return freed memory to the system.
    """

    progress: bool = False
    seed: int = 0
    file: Path | None = None
    between: Callable[[], None] = _nothing


_CURRENT: ContextVar[Work] = ContextVar("work", default=Work())  # noqa: B039  frozen


@contextmanager
def working(
    *, progress: bool, seed: int, file: Path | None, between: Callable[[], None] = _nothing
) -> Iterator[None]:
    """Sets the `Work` of algorithms within the context."""
    token = _CURRENT.set(Work(progress, seed, file, between))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Work:
    """Returns the settings of the innermost `working`; the default ones outside of any."""
    return _CURRENT.get()


def fingerprint(*parts: Any) -> str:
    """Returns a hexadecimal digest of tensors (their bytes), mappings of them, and values that JSON can express."""
    digest = hashlib.sha256()
    for part in parts:
        for name, one in sorted(part.items()) if isinstance(part, Mapping) else [("", part)]:
            digest.update(name.encode())
            if isinstance(one, Tensor):
                digest.update(f"{one.dtype}{tuple(one.shape)}".encode())
                digest.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            else:
                digest.update(json.dumps(one, sort_keys=True, default=str).encode())
    return digest.hexdigest()


class Journal:
    """The finished blocks of one call of an algorithm, in order, each in a file of its own.

    Args:
        file: the path NAME.partial; blocks are stored as NAME.0.partial, NAME.1.partial, ... None: they are
            not stored.
        key: a fingerprint of everything that the blocks depend on.
    """

    def __init__(self, file: Path | None, key: str) -> None:
        self._file, self._key, self._count = file, key, 0
        self._reads = True  # until a block is missing: all later ones are then computed again

    def next(self, learn: Callable[[], Found]) -> Found:
        """Returns the result of the next block, from its file if possible; else calls `learn` and stores its result."""
        path = None if self._file is None else block_file(self._file, self._count)
        self._count += 1
        stored = None if path is None or not self._reads else self._stored(path)
        if stored is not None:
            return stored
        self._reads = False
        found = {name: value.detach().cpu() for name, value in learn().items()}
        if path is not None:
            content = {"key": self._key, "digest": fingerprint(found), "found": found}
            with secret(path) as temporary, temporary.open("wb") as stream:
                torch.save(content, stream)
        return found

    def _stored(self, path: Path) -> Found | None:
        """Returns the block in a file.

        None if there is no file, or, with a warning, if the file is damaged or has another key.
        """
        if not path.is_file():
            return None
        with readable(path) as plain:
            content = plain.read_bytes()
        try:
            stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            reason = (
                ""
                if stored["key"] == self._key
                else "the file was written for another model, other data or other settings"
            )
            found: Found = stored["found"]
            if stored["digest"] != fingerprint(found):
                reason = "the file is damaged"
        except Exception as error:  # any content is possible
            reason = f"the file cannot be read ({type(error).__name__})"
        if reason:
            warn(f"{path}: {reason}; its block and all later ones are computed again")
            return None
        return found


def block_file(file: Path, number: int) -> Path:
    """Returns the file of a block, with the suffix of `file`."""
    return file.with_name(f"{file.stem}.{number}{file.suffix}")
