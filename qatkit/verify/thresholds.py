"""The bounds that a run must keep, in one order: each one broken becomes one line that names its key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from qatkit.verify.checks.base import Check, Shortfall, default_checks
from qatkit.verify.results import Results

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig


def thresholds(config: VerifyConfig, results: Results) -> list[str]:
    """Each shortfall as one line; empty passes. A bound whose measurement is absent falls short too."""
    return [one.line for one in shortfalls(default_checks(), config, results)]


def shortfalls(checks: Sequence[Check], config: VerifyConfig, results: Results) -> list[Shortfall]:
    """What falls short, whatever the order of the checks: as the bounds stand in `VerifyConfig`, others last."""
    keys = [f"verify.{field.name}" for field in fields(config)]

    def place(shortfall: Shortfall) -> int:
        key = shortfall.line.partition("=")[0]
        return keys.index(key) if key in keys else len(keys)

    return sorted((one for check in checks for one in check.shortfalls(config, results)), key=place)
