"""Collects the bounds that a run missed, in a fixed order, each with one line that begins with its key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from qatkit.records.results import Results
from qatkit.verify.checks.base import Check, Shortfall

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig


def shortfalls(checks: Sequence[Check], config: VerifyConfig, results: Results) -> list[Shortfall]:
    """Returns the shortfalls in the order of the bounds in `VerifyConfig`, others last.

    If a check has measured the cause of another check's shortfall, only the fixes for that cause are proposed.
    """
    keys = [f"verify.{field.name}" for field in fields(config)]

    def place(shortfall: Shortfall) -> int:
        key = shortfall.line.partition("=")[0]
        return keys.index(key) if key in keys else len(keys)

    found = [(check, one) for check in checks for one in check.shortfalls(config, results)]
    return sorted((_explained(one, own, checks, results) for own, one in found), key=place)


def _explained(shortfall: Shortfall, own: Check, checks: Sequence[Check], results: Results) -> Shortfall:
    """Returns the shortfall of the check `own`, with the fixes of another check that knows its cause."""
    for check in checks:
        fixes = None if check is own else check.explains(shortfall, results)
        if fixes is not None:
            line = f"{shortfall.line}; the cause is {check.name}, on this processor"
            return replace(shortfall, line=line, fixes=fixes, explained=True)
    return shortfall
