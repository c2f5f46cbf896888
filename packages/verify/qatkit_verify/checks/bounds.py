"""Reads from the report whether the run that made the bundle met its own bounds; few are measured again."""

from __future__ import annotations

from qatkit_verify.checks.base import OK, SHORT, CheckInputs, Found
from qatkit_verify.errors import counted

ACCEPT = "--accept-missed-bounds"
_FIX = f"deliver a run that meets its bounds, or accept the bounds that this one missed with {ACCEPT}"


def bounds(asked: CheckInputs) -> list[Found]:
    """Reports the bounds that the run missed, from report.json; returns no result if the bundle has no report."""
    if not asked.report:
        return []
    missed = [str(line) for line in asked.report.get("shortfalls") or ()]
    figures = {"missed": missed, "accepted": bool(missed) and asked.accept_missed}
    if not missed:
        return [Found("bounds", OK, "the run that made the bundle met all of its bounds", figures=figures)]
    seen = f"the run that made the bundle missed {counted(len(missed), 'bound')}: {'; '.join(missed)}"
    if asked.accept_missed:
        return [Found("bounds", OK, f"{seen} (accepted with {ACCEPT})", figures=figures)]
    return [Found("bounds", SHORT, seen, _FIX, figures)]
