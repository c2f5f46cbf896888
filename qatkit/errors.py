"""One exception for everything a user can put right, always one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 300  # characters of a value in a message
_LONGEST_REASON = 2000


class ConfigError(ValueError):
    """A key or file with a value that cannot be used. The message names all three parts."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        super().__init__(f"{printable(key)}={printable(value)}: {printable(allowed, _LONGEST_REASON)}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.allowed)


def printable(value: object, longest: int = _LONGEST) -> str:
    """A value as one line of a terminal: what moves the cursor is escaped, what is very long is cut."""
    text = " ".join(str(value).split())
    cut = text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in cut)


def near_matches(word: str, words: Iterable[str], n: int = 5) -> str:
    """`words` closest to `word`, for the end of an error message ("did you mean ...")."""
    pool = sorted(set(words))
    return ", ".join(difflib.get_close_matches(word[:_LONGEST], pool, n=n, cutoff=0.3) or pool[:n])


def first_line(error: BaseException) -> str:
    """An exception's message for the end of a line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
