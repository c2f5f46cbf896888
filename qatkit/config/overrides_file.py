"""The setting `backend.overrides_file`: a YAML or JSON file for overrides that cannot be typed as arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from qatkit_verify.errors import ConfigError
from qatkit_verify.untrusted import read_yaml

_KEY = "backend.overrides_file"


def with_overrides_file(values: Any) -> Any:
    """Returns the plain values of a configuration, with the file's overrides before those in `backend.overrides`.

    If both have the same selector, the file's override is dropped. The file is not needed afterwards, since the
    config.yaml of a run contains all overrides.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping from selectors to settings.
    """
    backend = values.get("backend") if isinstance(values, dict) else None
    if not isinstance(backend, dict) or not isinstance(file := backend.get("overrides_file"), str):
        return values
    allowed = "a YAML or JSON file with {SELECTOR: {SETTING: VALUE, ...}, ...}"
    try:
        found = yaml.safe_load(read_yaml(Path(os.path.expanduser(file))))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = f"the file cannot be read ({' '.join(str(error).split())})"
        raise ConfigError(_KEY, file, reason=reason) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(one, dict) for name, one in found.items()
    ):
        raise ConfigError(_KEY, file, allowed)
    overrides = {**found, **(backend.get("overrides") or {})}
    return values | {"backend": backend | {"overrides": overrides, "overrides_file": None}}
