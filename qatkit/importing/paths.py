"""Paths of modules for the names of nodes."""

from __future__ import annotations

import keyword
import re
import unicodedata

from torch import nn

_FORBIDDEN = re.compile(r"[\"'\\\s{}\x00-\x1f]")  # what the code that torch.fx writes could not quote
# Attributes of every module, and the first argument of the function that a graph becomes.
_NEVER = frozenset((*dir(nn.Module()), "self"))


class Paths:
    """Gives each node a path of its own, which is its name wherever torch allows it.

    A path may not be a part of another one: a module of torch.nn with a child would not be a leaf any more.
    """

    def __init__(self, reserved: set[str]) -> None:
        self._taken: set[str] = set()
        self._parents: set[str] = set()
        self._reserved = reserved

    def of(self, name: str) -> str:
        """Returns a path for a node; names that torch can't take are changed in the letters that are in its way."""
        parts = [_allowed(part) for part in _FORBIDDEN.sub("_", name).split(".") if part] or ["node"]
        if parts[0] in self._reserved:
            parts[0] += "_"
        path, number = ".".join(parts), 0
        if self._clashes(path):
            path = "_".join(parts)
        while self._clashes(found := f"{path}_{number}" if number else path):
            number += 1
        self._taken.add(found)
        pieces = found.split(".")
        self._parents |= {".".join(pieces[:i]) for i in range(1, len(pieces))}
        return found

    def _clashes(self, path: str) -> bool:
        pieces = path.split(".")
        above = (".".join(pieces[:i]) for i in range(1, len(pieces)))
        return path in self._taken or path in self._parents or any(parent in self._taken for parent in above)


def _allowed(part: str) -> str:
    """Returns a part of a path that Python reads as it is written, and that no module has as an attribute."""
    if part.isidentifier():
        part = unicodedata.normalize("NFKC", part)  # as Python reads identifiers
    return f"{part}_" if keyword.iskeyword(part) or part in _NEVER else part
