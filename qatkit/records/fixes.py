"""The proposed ways to meet a missed bound: settings for the same command line, or a change in words."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fix:
    """One way to meet a missed bound.

    Attributes:
        settings: the overrides as Hydra reads them, without the quotes of a shell; () for a change in words.
        note: what the settings do; without settings, the change itself.
        script: "train.py" if the settings start a run of their own on the same data; "" if they are added to the
            command line of this run.
    """

    settings: tuple[str, ...] = ()
    note: str = ""
    script: str = ""

    def __str__(self) -> str:
        typed = shlex.join([*filter(None, [self.script]), *self.settings])
        return f"{typed} ({self.note})" if typed and self.note else typed or self.note


def either(fixes: Iterable[Fix]) -> str:
    """Returns alternatives as one line: "algorithm=auto (...), or schedule.epochs=4"; "" for none."""
    return ", or ".join(map(str, fixes))
