"""Compares the settings of a resumed run with those that it began with; tables list the settings that may change.

    config.yaml in the folder ─┐
    current configuration ─────┴─ compared key by key ──> refused, or a note in the report

Settings that decide ranges, weights or the order of images must not change, so that a resumed run has the
same result as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from qatkit.config.compose import load_config
from qatkit.config.schema import Config
from qatkit.records.run_files import CLIMB_FILE, CONFIG_FILE, last_checkpoint
from qatkit_verify.errors import ConfigError, as_typed

# Settings of the machine and the monitoring of a run, and of additional analyses and deliverables.
ELSEWHERE = (
    *("resume", "output_dir", "name"),
    *("data.root", "data.workers", "data.eval_batch_size", "data.download"),
    *("data.cache", "data.cache_mb"),
    *("trainer.compile", "trainer.channels_last"),  # they change only the order of sums
    *("trainer.accelerator", "trainer.progress", "trainer.debug", "trainer.checkpoint_every"),
    *("trainer.mlflow",),
    *("calibration.cache",),
    *("analysis",),
    *("export.publish", "export.version", "export.encrypt_bundle", "export.bundle", "export.bundle_as"),
    *("export.bundle_float", "export.golden_images", "export.sign", "export.demo", "export.demo_runtime"),
)
# The same, and settings that apply only after the weights exist.
MAY_CHANGE = (
    *ELSEWHERE,
    *("data.test_images",),
    *("model.checkpoint",),  # only the path may change; other weights are refused (`qatkit.run.float_model`)
    *("verify", "target", "export.tensorrt_table"),
    *("export.encrypt",),  # a key file may move; another key cannot decrypt the existing files and is refused
)
# Exceptions in these groups: they decide which images are used for training, and which epoch is kept.
FIXED = ("verify.every", "verify.held_out", "verify.validation")
# Factors of the number of images per step: each may change as long as their product does not.
_FACTORS = ("data.batch_size", "trainer.devices", "trainer.num_nodes", "trainer.accumulate")
_SHARES = (*_FACTORS, "trainer.strategy", "trainer.sync_batch_norm")
_SHOWN = 3


def resumed_from(folder: Path, config: Config) -> tuple[str, ...]:
    """Returns the note for the report of a resumed run (its checkpoint and changed settings); () for a new run.

    Raises:
        ConfigError: `changes` raises it.
    """
    found = last_checkpoint(folder) if config.resume is not None else None
    if found is None:
        return ()
    changed = changes(folder, config)
    return (f"resumed from {found.name}" + (f"; changed since: {', '.join(changed)}" if changed else ""),)


def changes(folder: Path, config: Config) -> list[str]:
    """Describes the differences from the settings of the run in `folder`; empty if its configuration is missing.

    Raises:
        ConfigError: settings have changed that must not; the message names the first few of them.
    """
    path = folder / (CLIMB_FILE if config.rescue.climb else CONFIG_FILE)
    if not path.is_file():
        return []
    before, now = dict(flat(asdict(load_config(path)))), dict(flat(asdict(config)))
    differ = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    step = _images_a_step(now)
    shared = _SHARES if step is not None and step == _images_a_step(before) else ()
    fixed = [key for key in differ if (key in FIXED or not listed(key, MAY_CHANGE)) and key not in shared]
    if fixed:
        told = ", ".join(
            f"{key} is {as_typed(before.get(key))} there, but {as_typed(now.get(key))} here"
            for key in fixed[:_SHOWN]
        )
        more = f", and {len(fixed) - _SHOWN} more" if len(fixed) > _SHOWN else ""
        allowed = (
            f"a run with the same settings ({told}{more}); only these may change: {', '.join(MAY_CHANGE[3:])}"
        )
        raise ConfigError("resume", folder, allowed)
    told_keys = [key for key in differ if key not in ("resume", "output_dir")]
    return [f"{key} {as_typed(before.get(key))} → {as_typed(now.get(key))}" for key in told_keys]


def _images_a_step(config: dict[str, Any]) -> int | None:
    """Returns the images per step; None if that depends on the machine (trainer.devices=-1)."""
    factors = [config.get(key, 1) for key in _FACTORS]
    return None if -1 in factors else math.prod(factors)


def listed(key: str, table: Sequence[str]) -> bool:
    """Returns whether a setting, or a group that contains it, is in `table`."""
    return any(key == one or key.startswith(f"{one}.") for one in table)


def flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every setting; the order within `algorithm` counts as part of its value."""
    for key, value in values.items():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value and not is_dataclass(value) and inner != "algorithm":
            yield from flat(value, inner)
        else:
            yield inner, list(value.items()) if isinstance(value, dict) else value
