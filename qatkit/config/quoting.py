"""Quoting of texts, so that Hydra reads them unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable

_CALL = re.compile(r"(\+{0,2}verify\.decision)=(\w+\(.*\))", re.DOTALL)
_HYDRAS = ("choice(", "glob(", "interval(", "range(", "shuffle(", "sort(", "str(", "tag(")


def quoted(text: str) -> str:
    """Returns a text in quotes for an override. In Hydra's grammar a backslash is an escape only before a quote."""
    escaped = re.sub(r"(\\*)'", lambda found: 2 * found[1] + "\\'", text)
    return f"'{escaped}{escaped[len(escaped.rstrip(chr(92))) :]}'"


def calls_quoted(overrides: Iterable[str]) -> list[str]:
    """Returns the overrides, with the value of verify.decision in quotes if it has arguments.

    Without quotes Hydra would read a value such as boxes(score=0.4) as a call of one of its own functions.
    Calls of Hydra's functions stay unquoted.
    """
    found = []
    for text in overrides:
        call = _CALL.fullmatch(text)
        if call is None or call[2].startswith(_HYDRAS):
            found.append(text)
        else:
            found.append(f"{call[1]}={quoted(call[2])}")
    return found
