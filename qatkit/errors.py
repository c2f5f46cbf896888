"""One exception for everything a user can put right, always one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A key or file with a value that cannot be used. The message names all three parts."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        self.key, self.value, self.allowed = key, value, allowed
        super().__init__(f"{key}={value!s}: {allowed}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.key, self.value, self.allowed)


def near_matches(word: str, words: Iterable[str], n: int = 5) -> str:
    """`words` closest to `word`, for the end of an error message ("did you mean ...")."""
    pool = sorted(set(words))
    return ", ".join(difflib.get_close_matches(word, pool, n=n, cutoff=0.3) or pool[:n])


def first_line(error: BaseException) -> str:
    """An exception's message for the end of a line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
