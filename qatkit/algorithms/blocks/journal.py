"""What is finished of a long algorithm, in a file: a run that is killed goes on with the next block.

    with working(progress=True, seed=0, file=folder / "adaround.partial"):
        module.correct(batches, [algorithm])

The file holds what each finished block came to, and a key: a fingerprint of the graph, the ranges, the settings and
the images. It is replaced as a whole after each block. One that is damaged or of something else is put aside with a
warning; whoever opened it removes it (`qatkit.choose.ranges`), once what it led to is in a checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qatkit.encryption.vault import readable, secret

Found = dict[str, Tensor]  # what a block came to


@dataclass(frozen=True)
class Work:
    """How an algorithm works that takes long.

    Attributes:
        progress: with a bar.
        seed: of the order of its images.
        file: what is finished, None: nowhere.
    """

    progress: bool = False
    seed: int = 0
    file: Path | None = None


_CURRENT: ContextVar[Work] = ContextVar("work", default=Work())  # noqa: B039  frozen


@contextmanager
def working(*, progress: bool, seed: int, file: Path | None) -> Iterator[None]:
    """What algorithms called within show, and where they keep what they have finished."""
    token = _CURRENT.set(Work(progress, seed, file))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Work:
    """Of the innermost `working`."""
    return _CURRENT.get()


def fingerprint(*parts: Any) -> str:
    """Hexadecimal digits of tensors (their bytes), mappings of them, and what has a JSON."""
    digest = hashlib.sha256()
    for part in parts:
        for name, one in sorted(part.items()) if isinstance(part, Mapping) else [("", part)]:
            digest.update(name.encode())
            if isinstance(one, Tensor):
                digest.update(f"{one.dtype}{tuple(one.shape)}".encode())
                digest.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                digest.update(json.dumps(one, sort_keys=True, default=str).encode())
    return digest.hexdigest()


class Journal:
    """The finished blocks of one call, in their order.

    Args:
        file: where they are kept; None: in memory alone.
        key: of what they depend on.
    """

    def __init__(self, file: Path | None, key: str) -> None:
        self.file, self.key, self.read = file, key, 0
        self.found: list[Found] = [] if file is None or not file.is_file() else self._stored(file)

    def next(self, learn: Callable[[], Found]) -> Found:
        """What the next block came to: as it stands here, else by `learn`, and then it stands here."""
        self.read += 1
        if self.read > len(self.found):
            self.found.append({name: value.detach().cpu() for name, value in learn().items()})
            self._write()
        return self.found[self.read - 1]

    def _write(self) -> None:
        if self.file is None:
            return
        stored = {"key": self.key, "digest": self._digest(self.found), "found": self.found}
        with secret(self.file) as temporary, temporary.open("wb") as stream:
            torch.save(stored, stream)

    def _digest(self, found: list[Found]) -> str:
        return fingerprint(*found)

    def _stored(self, file: Path) -> list[Found]:
        with readable(file) as plain:
            content = plain.read_bytes()
        try:
            stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            reason = "" if stored["key"] == self.key else "is of another model, data or setting"
            if stored["digest"] != self._digest(stored["found"]):
                reason = "is damaged"
        except Exception as error:  # whatever a file may hold
            reason = f"can't be read ({type(error).__name__})"
        if reason:
            warnings.warn(f"{file}: {reason}; its blocks are done again", stacklevel=2)
            return []
        found: list[Found] = stored["found"]
        return found
