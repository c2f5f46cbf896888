"""The bounds that a run must meet, in one order: each one missed becomes one line that names its key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from qatkit.records.results import Results
from qatkit.verify.checks.base import Check, Shortfall

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig


def shortfalls(checks: Sequence[Check], config: VerifyConfig, results: Results) -> list[Shortfall]:
    """What falls short, whatever the order of the checks: as the bounds stand in `VerifyConfig`, others last.

    Where a check has measured the cause of another one's shortfall, the fix for that cause is the only one.
    """
    keys = [f"verify.{field.name}" for field in fields(config)]

    def place(shortfall: Shortfall) -> int:
        key = shortfall.line.partition("=")[0]
        return keys.index(key) if key in keys else len(keys)

    found = [(check, one) for check in checks for one in check.shortfalls(config, results)]
    return sorted((_explained(one, own, checks, results) for own, one in found), key=place)


def _explained(shortfall: Shortfall, own: Check, checks: Sequence[Check], results: Results) -> Shortfall:
    """The shortfall of the check `own`, with the fix of another one that knows its cause."""
    for check in checks:
        fix = None if check is own else check.explains(shortfall, results)
        if fix is not None:
            line = f"{shortfall.line}; the cause is {check.name}, on this processor"
            return replace(shortfall, line=line, fix=fix, explained=True)
    return shortfall
