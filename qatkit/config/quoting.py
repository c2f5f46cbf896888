"""How a text is typed, so that Hydra reads it as it is."""

from __future__ import annotations

import re


def quoted(text: str) -> str:
    """As an override has to have it: Hydra's grammar takes a backslash for one, but before a quote."""
    escaped = re.sub(r"(\\*)'", lambda found: 2 * found[1] + "\\'", text)
    return f"'{escaped}{escaped[len(escaped.rstrip(chr(92))) :]}'"
