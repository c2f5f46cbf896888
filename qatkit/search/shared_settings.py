"""What all workers of a study, and whoever goes on with it, must have alike: whatever decides a trial's figures.

What may be another is where a worker is, how it is watched and what would be handed over (as in a run that goes on,
`qatkit.run.resume`), and how the study goes on from here. Files may lie elsewhere: what they hold is compared.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qatkit.config.schema import Config
from qatkit.run.resume import ELSEWHERE, flat, listed

MAY_DIFFER = (
    *ELSEWHERE,
    *(
        "search.trials",
        "search.worker",
        "search.attempts",
        "search.storage",
        "search.prune",
        "search.startup",
    ),
    *("search.space", "search.objectives", "search.constraints"),  # compared by themselves
)
_FILES = ("model.checkpoint", "schedule.distill_checkpoint", "placement")
_KEY = "export.encrypt"  # another key is refused by what it encrypted; none would leave trials in the clear


def settings_of(config: Config) -> dict[str, Any]:
    """By dotted key, plain values."""
    found = {key: value for key, value in flat(asdict(config)) if not listed(key, MAY_DIFFER)}
    for key in _FILES:
        path = Path(found[key] or "")
        if path.is_file():
            with path.open("rb") as stream:
                found[key] = f"a file of SHA-256 {hashlib.file_digest(stream, 'sha256').hexdigest()[:16]}"
    if found["task"] == Config().task:  # studies that began before there were tasks know no other
        del found["task"]
    return found | {_KEY: "null" if found[_KEY] is None else "a key"}
