"""What may be another in a run that goes on than in the one that was stopped, in one table, and what was changed.

    config.yaml in the folder ── compared key by key ── now ──> refused, or a note of the report

What decides ranges, weights or the order of images has to be the same: a resumed run ends as the uninterrupted one.
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
from qatkit_verify.errors import ConfigError

# Where a process is, how it is watched, and what is looked into and handed over beside its figures.
ELSEWHERE = (
    *("resume", "output_dir", "name"),
    *("data.root", "data.workers", "data.eval_batch_size", "data.download"),
    *("data.cache", "data.cache_mb"),
    *("trainer.compile", "trainer.channels_last"),  # the same sums, in another order
    *("trainer.accelerator", "trainer.progress", "trainer.debug", "trainer.checkpoint_every"),
    *("trainer.mlflow",),
    *("calibration.cache",),
    *("analysis",),
    *("export.publish", "export.version", "export.encrypt_bundle", "export.bundle", "export.bundle_as"),
    *("export.bundle_float", "export.golden_images", "export.sign", "export.demo", "export.demo_runtime"),
)
# And what is asked once the weights are there.
MAY_CHANGE = (
    *ELSEWHERE,
    *("data.test_images",),
    *("model.checkpoint",),  # where it lies; other weights are refused (`qatkit.run.float_model`)
    *("verify", "target", "export.tensorrt_table"),
    *("export.encrypt",),  # a key file may move; another key is refused by what it encrypted
)
# Of those groups what decides which images train, and which epoch is kept.
FIXED = ("verify.every", "verify.held_out", "verify.validation")
# How a step's images are shared out: other numbers of processes, as long as their product stays.
_FACTORS = ("data.batch_size", "trainer.devices", "trainer.num_nodes", "trainer.accumulate")
_SHARES = (*_FACTORS, "trainer.strategy", "trainer.sync_batch_norm")
_SHOWN = 3


def resumed_from(folder: Path, config: Config) -> tuple[str, ...]:
    """What the report says of a run that goes on: from what, and with which settings changed; nothing of a new one.

    Raises:
        ConfigError: as `changes`.
    """
    found = last_checkpoint(folder) if config.resume is not None else None
    if found is None:
        return ()
    changed = changes(folder, config)
    return (f"resumed from {found.name}" + (f"; changed since: {', '.join(changed)}" if changed else ""),)


def changes(folder: Path, config: Config) -> list[str]:
    """What is another than in the run of `folder`, in words; empty where its configuration can't be read any more.

    Raises:
        ConfigError: something that may not change; it names the first few of them.
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
            f"{key} {_shown(before.get(key))} there, {_shown(now.get(key))} here" for key in fixed[:_SHOWN]
        )
        more = f", and {len(fixed) - _SHOWN} more" if len(fixed) > _SHOWN else ""
        allowed = f"a run of these settings ({told}{more}); what may change: {', '.join(MAY_CHANGE[3:])}"
        raise ConfigError("resume", folder, allowed)
    told_keys = [key for key in differ if key not in ("resume", "output_dir")]
    return [f"{key} {_shown(before.get(key))} → {_shown(now.get(key))}" for key in told_keys]


def _images_a_step(config: dict[str, Any]) -> int | None:
    """None where that depends on the machine (trainer.devices=-1)."""
    factors = [config.get(key, 1) for key in _FACTORS]
    return None if -1 in factors else math.prod(factors)


def listed(key: str, table: Sequence[str]) -> bool:
    """Whether a setting, or the group that it is in, is in `table`."""
    return any(key == one or key.startswith(f"{one}.") for one in table)


def flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); the order of algorithms is part of theirs."""
    for key, value in values.items():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value and not is_dataclass(value) and inner != "algorithm":
            yield from flat(value, inner)
        else:
            yield inner, list(value.items()) if isinstance(value, dict) else value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
