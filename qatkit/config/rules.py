"""The rules for combinations of several values in a configuration.

Hydra's schema has already checked names and types before these rules, and the limit of a single value is
declared with its field (`schema`). Every error names the key as it is typed, the value, and what is allowed.
The rules are checked before long work, and before any file is written.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qatkit.config.export_rules import check_export
from qatkit.config.fields import check_limits
from qatkit.config.override_rules import check_override
from qatkit.config.schema import Config, DataConfig
from qatkit.config.search_space import axes
from qatkit.config.selectors import check_selectors
from qatkit.records.objectives import check_objectives, constraints
from qatkit_verify.errors import ConfigError, as_typed
from qatkit_verify.files import not_writable
from qatkit_verify.fitting import LEVELS, covers

# Settings that name code by its dotted path, in addition to `verify.checks`, `verify.runtimes` and
# `algorithm.*.target`.
DOTTED = (
    "backend.target",
    "calibration.observer",
    "quantizer.activation",
    "quantizer.weight",
    "data.source",
    "model.name",
)


def validate(config: Config) -> None:
    """Checks every value; null means "not set" and is skipped.

    Raises:
        ConfigError: a field does not allow a value, or two values exclude each other; the first problem is
            reported.
    """
    check_limits(config, "")
    _check_run(config)
    check_export(config)
    _check_preprocessing(config.data)
    check_selectors(config.backend)
    for pattern, override in config.backend.overrides.items():
        check_override(f"backend.overrides.{pattern}", pattern, override)


def _check_run(config: Config) -> None:
    if config.name in ("", ".", "..") or Path(config.name).name != config.name:
        raise ConfigError("name", config.name, "the name of a folder, without a path")
    _check_cache(config.calibration.cache)
    if config.analysis.histograms and not config.analysis.tensors:
        raise ConfigError(
            "analysis.histograms", True, "false with analysis.tensors=0, which compares no tensor"
        )
    _check_algorithm(config.algorithm)
    _check_choice(config)
    _check_rescue(config)
    _check_precision(config)
    _check_schedule(config)
    _check_search(config)


def _check_cache(cache: str | None) -> None:
    """Checks early that the cache can be written, since hours of training may precede the calibration."""
    if cache is None:
        return
    path = Path(cache).absolute()
    if os.path.lexists(path) and not path.is_file():
        raise ConfigError("calibration.cache", cache, "the path of a file; this path is not a file")
    if reason := "" if path.is_file() else not_writable(path.parent):
        raise ConfigError("calibration.cache", cache, f"a file in a folder that can be written to ({reason})")


def _check_algorithm(chosen: Mapping[str, Any]) -> None:
    """Checks that each entry names a class; the class then checks its settings (`algorithms.base`)."""
    for name, entry in chosen.items():
        if isinstance(entry, Mapping) and isinstance(entry.get("target"), str):
            continue
        shown = (
            ", ".join(f"{key}: {value}" for key, value in entry.items())
            if isinstance(entry, Mapping)
            else entry
        )
        allowed = (
            "{target: DOTTED_PATH, SETTING: VALUE, ...}; on the command line, algorithm=NAME selects "
            "a file of conf/algorithm, and algorithm.NAME.SETTING=VALUE changes a setting"
        )
        raise ConfigError(f"algorithm.{name}", shown, allowed)


def _check_choice(config: Config) -> None:
    """Checks algorithm_choice=auto: it needs at least one algorithm, and real calibration samples."""
    if config.algorithm_choice != "auto":
        return
    if not config.algorithm:
        allowed = "all if no algorithm is listed (algorithm=auto lists candidates)"
        raise ConfigError("algorithm_choice", "auto", allowed)
    if config.calibration.random:
        allowed = "false with algorithm_choice=auto, which compares algorithms on real samples"
        raise ConfigError("calibration.random", True, allowed)


def _check_rescue(config: Config) -> None:
    """Checks a rescue: it needs static export, and trains in a single process."""
    if not config.rescue.climb:
        return
    for key, value, needed in (
        ("export.mode", config.export.mode, "static"),
        ("trainer.devices", config.trainer.devices, 1),
        ("trainer.num_nodes", config.trainer.num_nodes, 1),
    ):
        if value != needed:
            raise ConfigError(key, value, f"{needed} with rescue.climb=true")


def _check_precision(config: Config) -> None:
    """Checks mixed precision: either a search, or one point of the front that an earlier search has found.

    Both need static export; the search also needs real calibration samples. Only the search can reach
    target.min_speedup.
    """
    asked = config.precision
    if (asked.front is None) != (asked.point is None):
        if asked.front is None:
            reason = "the folder of the front is missing; add precision.front=FOLDER"
            raise ConfigError("precision.point", asked.point, reason=reason)
        reason = "the index of a point is missing; add precision.point=NUMBER"
        raise ConfigError("precision.front", asked.front, reason=reason)
    if asked.search == "none":
        if config.target.min_speedup is not None:
            allowed = "null without precision=auto, the only search for a speed-up (verify.min_speedup sets a bound)"
            raise ConfigError("target.min_speedup", config.target.min_speedup, allowed)
        if asked.front is None:
            return
    elif asked.front is not None:
        raise ConfigError(
            "precision.front", asked.front, "null with precision=auto, which computes its own front"
        )
    elif config.rescue.climb:
        raise ConfigError(
            "precision.search", "auto", "none with rescue.climb=true, which has its own mixed-precision rung"
        )
    needed = "precision=auto" if asked.front is None else "precision.front"
    if config.export.mode != "static":
        raise ConfigError("export.mode", config.export.mode, f"static with {needed}")
    if config.calibration.random and asked.front is None:
        allowed = "false with precision=auto, which measures the loss of each operator on real samples"
        raise ConfigError("calibration.random", True, allowed)


def _check_schedule(config: Config) -> None:
    """Rejects training settings that would be ignored silently or cannot work with the others."""
    schedule = config.schedule
    if schedule.batch_norm_images and schedule.batch_norm == "fold":
        allowed = "0 with schedule.batch_norm=fold, which leaves no BatchNorm (freeze and train keep it)"
        raise ConfigError("schedule.batch_norm_images", schedule.batch_norm_images, allowed)
    if schedule.batch_norm_images == 1:
        allowed = "0, or 2 or more, since one sample has no variance"
        raise ConfigError("schedule.batch_norm_images", 1, allowed)
    if schedule.relative_lr and schedule.optimizer != "adamw":
        allowed = "false with schedule.optimizer=sgd, since only adamw has relative learning rates"
        raise ConfigError("schedule.relative_lr", True, allowed)
    trains = schedule.epochs > 0 or config.rescue.climb
    if config.verify.every is not None and not trains:
        allowed = "null with schedule.epochs=0, which leaves no epochs to choose from"
        raise ConfigError("verify.every", config.verify.every, allowed)
    for key in ("distill_teacher", "distill_checkpoint"):
        if getattr(schedule, key) is not None and not (schedule.distill or schedule.distill_features):
            allowed = "null without schedule.distill above 0 or schedule.distill_features"
            raise ConfigError(f"schedule.{key}", getattr(schedule, key), allowed)
    if schedule.distill_features and config.algorithm_choice == "auto":
        allowed = "[] with algorithm_choice=auto, whose algorithms may rescale the channels of these features"
        raise ConfigError("schedule.distill_features", schedule.distill_features, allowed)


def _check_search(config: Config) -> None:
    """Checks the space, objectives, constraints and storage of a search.

    Each trial must be a run in a single process, without a rescue.
    """
    asked = config.search
    if asked.trials == 0:
        if asked.space:
            raise ConfigError("search.trials", 0, "1 or more with search.space (search=optuna sets 30)")
        return
    axes(asked.space)
    check_objectives(asked.objectives)
    constraints(asked.constraints)
    url = None if asked.storage == "journal" else asked.storage
    if url is not None and ("://" not in url or _in_memory(url)):
        allowed = "null (SQLite in the study's folder), journal, or a database URL such as postgresql://user@host/name"
        lost = "; a study in memory is lost when its worker ends" if "://" in url else ""
        raise ConfigError("search.storage", _without_password(url), allowed + lost)
    without = _without_password(asked.storage or "")
    if without != (asked.storage or ""):  # a password would be in the config.yaml and the report of every run
        allowed = "a URL without a password (use PGPASSWORD or ~/.pgpass)"
        raise ConfigError("search.storage", without, allowed)
    for key, value, allowed_values in (
        ("rescue.climb", config.rescue.climb, (False,)),
        ("trainer.devices", config.trainer.devices, (1,)),
        ("trainer.num_nodes", config.trainer.num_nodes, (1,)),
        ("resume", config.resume, (None, "auto")),
    ):
        if value not in allowed_values:
            allowed = " or ".join(as_typed(one) for one in allowed_values)
            raise ConfigError(key, value, f"{allowed} with search.trials={asked.trials}")


def _in_memory(url: str) -> bool:
    """Returns whether a URL is that of an SQLite database in memory."""
    driver, _, rest = url.partition("://")
    path, _, query = rest.partition("?")
    without = path.strip("/") in ("", ":memory:") or path.startswith("/file::memory:")
    return driver.partition("+")[0].lower() == "sqlite" and (without or "mode=memory" in query)


def _without_password(url: str) -> str:
    """Returns a URL without passwords: `***` replaces user and password before the last `@`, and those in the query."""
    url = re.sub(r"(?<=://)[^:/@]*:.*@", "***@", url)
    return re.sub(r"([?&;][^=&;]*(?:password|passwd|pwd))=[^&;]*", r"\1=***", url, flags=re.IGNORECASE)


def _check_preprocessing(data: DataConfig) -> None:
    """Checks that the resize covers the crop, and that there is one mean and one standard deviation per channel."""
    if data.resize is not None and data.image_size is not None and not covers(data.resize, data.image_size):
        raise ConfigError("data.resize", data.resize, f"a size that covers data.image_size={data.image_size}")
    for key, values in (("data.mean", data.mean), ("data.std", data.std)):
        if values is not None and not (len(values) in (1, 3) and all(map(math.isfinite, values))):
            raise ConfigError(key, values, "one finite number per channel: 1 (grey) or 3 (RGB)")
    if data.pixels != LEVELS and (data.mean is None) != (data.std is None):
        needed = "null" if data.mean is None else "numbers"
        raise ConfigError("data.std", data.std, f"{needed} with data.mean={as_typed(data.mean)}")
    if data.std is not None and min(data.std) <= 0:
        raise ConfigError("data.std", data.std, "numbers above 0")
