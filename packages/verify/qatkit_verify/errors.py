"""Defines the exception, with a one-line message, for everything that a user can fix. Finds disk errors."""

from __future__ import annotations

import difflib
import errno
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

_LONGEST = 300  # maximum number of characters of a value in a message
_LONGEST_REASON = 2000
_LONGEST_CAUSE = 400
_FEW = 12  # maximum number of words that a message lists
_LESS_SIMILAR = 0.15  # difference in similarity at which a word is no longer proposed beside a closer one
_SIMILAR, _LEAST = 0.6, 0.3  # similarity at which a word is proposed: of a few words, of many


class ConfigError(ValueError):
    """Raised for a key or file whose value cannot be used: "key=value: expected ..." or "key=value: reason".

    Args:
        key: the key of the configuration, or a word for what was given ("bundle").
        value: the value as it was given.
        expected: a noun phrase for what would be accepted, which reads on after "expected".
        reason: a clause that says what went wrong and how to fix it, if no expectation can be named.

    Attributes:
        key, value: as given.
        problem: the message without key and value, for an error that is raised again under another key.
    """

    def __init__(self, key: str, value: object, expected: str = "", *, reason: str = "") -> None:
        self.key, self.value = key, value
        self.problem = reason or f"expected {expected}"
        super().__init__(
            f"{printable(key)}={printable(as_typed(value))}: {printable(self.problem, _LONGEST_REASON)}"
        )

    def __reduce__(self) -> tuple[partial[ConfigError], tuple[str, object]]:
        return partial(type(self), reason=self.problem), (self.key, self.value)


def as_typed(value: object) -> str:
    """Returns a value as it is typed on the command line: null, true, [a, b], {key: value}."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_typed(one)}" for key, one in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "[" + ", ".join(map(as_typed, value)) + "]"
    return str(value)


def printable(value: object, longest: int = _LONGEST) -> str:
    """Returns a value as one line for a terminal: control characters are escaped, and long values are cut."""
    text = " ".join(str(value).split())
    cut = text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in cut)


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun: "1 image", "2,000 images"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def near_matches(word: str, words: Iterable[str], n: int = 5) -> str:
    """Returns the `n` of `words` that are closest to `word`, separated by commas; the first ones if none is similar."""
    pool = sorted(set(words))
    return ", ".join(_similar(word, pool, n) or pool[:n])


def did_you_mean(word: str, words: Iterable[str], n: int = 5) -> str:
    """Returns the end of an error message, " (did you mean a, b?)".

    If no word is similar, and there are few, it lists them, " (known: a, b)"; otherwise it is "". With `n=1`, words
    are never listed, since the message lists them already.
    """
    pool = sorted(set(words))
    listed = n > 1 and 0 < len(pool) <= _FEW
    if near := _similar(word, pool, n, _SIMILAR if listed else _LEAST):
        return f" (did you mean {', '.join(near)}?)"
    return f" (known: {', '.join(pool)})" if listed else ""


def _similar(word: str, pool: list[str], n: int, least_similar: float = _LEAST) -> list[str]:
    """Returns up to `n` similar words: the closest, then others that are nearly as similar.

    Words that differ only in case are the most similar ones.
    """
    typed = word[:_LONGEST]
    close = set(
        difflib.get_close_matches(typed.casefold(), {one.casefold() for one in pool}, n, least_similar)
    )
    near = {one: _ratio(one.casefold(), typed.casefold()) for one in pool if one.casefold() in close}
    least = max(near.values(), default=0.0) - _LESS_SIMILAR
    ranked = sorted(near, key=lambda one: (near[one], _ratio(one, typed)), reverse=True)
    return [one for one in ranked if near[one] > least][:n]


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(a=a, b=b).ratio()


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# Text before the cause: the runtime's number and kind of error, the file that it was loading (usually a
# temporary one of ours), and the place in its own source.
_BEFORE = (
    re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : "),
    re.compile(r"^Load model from .*? failed: ?"),
    re.compile(r"^onnx file=\S*: "),
    re.compile(r"^Non-zero status code returned while running (?=\w+ node\.)"),
    re.compile(r"(?<= )\S*/onnxruntime/\S+:\d+ (?:.*?\) )?(?:const )?"),
)

_WRAPPED = ("Error calling ", "In ")  # the prefixes with which onnx_ir wraps the cause


def one_line(error: BaseException) -> str:
    """Returns the cause in an exception's message as one line of limited length, without temporary paths."""
    while error.__cause__ is not None and str(error).startswith(_WRAPPED):
        error = error.__cause__
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError) and tempfile.gettempdir() in str(error.value):
        text = error.problem
    for pattern in _BEFORE:
        text = pattern.sub("", text, count=1)
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/[^\s'\":]*/", "", text)
    return text[:_LONGEST_CAUSE] or type(error).__name__


# Disks that are full (by size, a quota or a limit of the process), broken, or now read-only.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def disk_error(error: BaseException | None) -> OSError | None:
    """Returns the disk error in an exception's chain, or None; some libraries report it only as text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_DISKS:
            return error
        told = str(error)
        for number in _OF_DISKS:
            sqlite = number == errno.ENOSPC and "database or disk is full" in told
            if sqlite or f"(os error {number})" in told or os.strerror(number) in told:
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None
