"""Derives module paths from the names of nodes."""

from __future__ import annotations

import keyword
import re
import unicodedata

from torch import nn

_FORBIDDEN = re.compile(r"[\"'\\\s{}\x00-\x1f]")  # characters that the code of torch.fx cannot quote
# Names of attributes of every module, and of the first argument of a graph's forward function.
_NEVER = frozenset((*dir(nn.Module()), "self"))


class Paths:
    """Gives each node a unique path: its name, if torch allows it.

    No path may be the parent of another one, since a module of torch.nn with a child would no longer be a leaf.

    Args:
        reserved: the names of the model's own attributes, with which no path may begin.
    """

    def __init__(self, reserved: set[str]) -> None:
        self._taken: set[str] = set()
        self._parents: set[str] = set()
        self._reserved = reserved

    def of(self, name: str) -> str:
        """Returns a path for a node; characters that torch does not allow are replaced."""
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
    """Returns a part of a path; a keyword or the name of an attribute of every module gets a trailing "_"."""
    if part.isidentifier():
        part = unicodedata.normalize("NFKC", part)  # as Python reads identifiers
    return f"{part}_" if keyword.iskeyword(part) or part in _NEVER else part
