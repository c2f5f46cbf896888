"""The settings that all workers of a study must share, also after a restart, because they influence the results.

Other settings may differ between workers. These are the settings of the machine, the monitoring, the analyses
and the deliverables, which a resumed run may change too (`qatkit.run.resume`), and those that control the
search, such as the number of trials. Files may have other paths, since their contents are compared.
Encryption does not influence the results, but is shared so that no worker leaves its trials unencrypted.
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
    *("search.space", "search.objectives", "search.constraints"),  # compared separately
)
_FILES = ("model.checkpoint", "schedule.distill_checkpoint", "placement")
_KEY = "export.encrypt"  # another key fails on existing files; no key would leave trials unencrypted


def settings_of(config: Config) -> dict[str, Any]:
    """Returns the shared settings by dotted key.

    A file is represented by its digest, and `export.encrypt` only by whether there is a key. The space,
    the objectives and the constraints are left out, since the study compares them separately.
    """
    found = {key: value for key, value in flat(asdict(config)) if not listed(key, MAY_DIFFER)}
    for key in _FILES:
        path = Path(found[key] or "")
        if path.is_file():
            with path.open("rb") as stream:
                found[key] = f"a file of SHA-256 {hashlib.file_digest(stream, 'sha256').hexdigest()[:16]}"
    if found["task"] == Config().task:  # studies of versions without tasks have no such entry
        del found["task"]
    return found | {_KEY: "null" if found[_KEY] is None else "a key"}
