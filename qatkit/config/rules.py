"""The rules that join several values of a configuration.

Hydra's schema has already checked names and types when this runs, and the limit of a single value is declared
with its field (`schema`). Every error names the key as it is typed, the value, and what is allowed, before
anything takes long or is written.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qatkit.config.fields import check_limits
from qatkit.config.override_rules import check_override
from qatkit.config.schema import AnalysisConfig, Config, DataConfig, QuantizerConfig
from qatkit.config.search_space import axes
from qatkit.config.selectors import check_selectors, refuse_selectors
from qatkit.quant.spec import FORMAT_NAMES, NARROW_BIASES, WHOLE, WIDE
from qatkit.records.objectives import check_objectives, constraints
from qatkit_verify.errors import ConfigError
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
        ConfigError: the first value that its field does not allow, or two values that exclude each other.
    """
    check_limits(config, "")
    _check_run(config)
    _check_weights(config)
    _check_export(config)
    _check_bundle(config)
    _check_low_bits(config)
    _check_16_bits(config)
    _check_table(config)
    _check_axes(config)
    _check_encodings(config)
    _check_preprocessing(config.data)
    check_selectors(config.backend)
    for pattern, override in config.backend.overrides.items():
        check_override(f"backend.overrides.{pattern}", pattern, override)


def _check_run(config: Config) -> None:
    if config.name in ("", ".", "..") or Path(config.name).name != config.name:
        raise ConfigError("name", config.name, "a folder's name, without a path")
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
    """Checks early that the file can be written, since calibration may come after hours of training."""
    if cache is None:
        return
    path = Path(cache).absolute()
    if os.path.lexists(path) and not path.is_file():
        raise ConfigError("calibration.cache", cache, "the path of a file; this is something else")
    if reason := "" if path.is_file() else not_writable(path.parent):
        raise ConfigError("calibration.cache", cache, f"a file in a folder that can be written to ({reason})")


def _check_algorithm(chosen: Mapping[str, Any]) -> None:
    """Checks that each entry names a class, which then checks its own settings (`algorithms.base`)."""
    for name, entry in chosen.items():
        if isinstance(entry, Mapping) and isinstance(entry.get("target"), str):
            continue
        shown = (
            ", ".join(f"{key}: {value}" for key, value in entry.items())
            if isinstance(entry, Mapping)
            else entry
        )
        allowed = (
            "{target: DOTTED_PATH, SETTING: VALUE, ...}; on the command line algorithm=NAME chooses "
            "(a file of conf/algorithm), then algorithm.NAME.SETTING=VALUE sets"
        )
        raise ConfigError(f"algorithm.{name}", shown, allowed)


def _check_choice(config: Config) -> None:
    """Checks a competition of algorithms, which needs algorithms and real images to hold out."""
    if config.algorithm_choice != "auto":
        return
    if not config.algorithm:
        allowed = "all where no algorithm is listed; algorithm=auto lists those that compete"
        raise ConfigError("algorithm_choice", "auto", allowed)
    if config.calibration.random:
        allowed = "false with algorithm_choice=auto: noise says nothing of what an algorithm is worth"
        raise ConfigError("calibration.random", True, allowed)


def _check_rescue(config: Config) -> None:
    """Checks a rescue: its rungs are decided by figures of one machine, for a module that is trained here."""
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
    """Checks mixed precision: a search judges and times files made from a module, and a point belongs to a front."""
    asked = config.precision
    if (asked.front is None) != (asked.point is None):
        key, value = ("point", asked.point) if asked.front is None else ("front", asked.front)
        allowed = "both precision.front=FOLDER and precision.point=NUMBER"
        raise ConfigError(f"precision.{key}", value, allowed)
    if asked.search == "none":
        if config.target.min_speedup is not None:
            allowed = (
                "null without precision=auto, which alone looks for a speed (verify.min_speedup is the bound)"
            )
            raise ConfigError("target.min_speedup", config.target.min_speedup, allowed)
        if asked.front is None:
            return
    elif asked.front is not None:
        raise ConfigError(
            "precision.front", asked.front, "null with precision=auto, which makes a front of its own"
        )
    elif config.rescue.climb:
        raise ConfigError("precision.search", "auto", "none with rescue.climb=true, which has a rung of it")
    needed = "precision=auto" if asked.front is None else "precision.front"
    if config.export.mode != "static":
        raise ConfigError("export.mode", config.export.mode, f"static with {needed}")
    if config.calibration.random and asked.front is None:
        allowed = "false with precision=auto: noise says nothing of what an operator loses"
        raise ConfigError("calibration.random", True, allowed)


def _check_schedule(config: Config) -> None:
    """Rejects settings of a way of training that is not in use, which would otherwise be ignored silently."""
    schedule = config.schedule
    if schedule.batch_norm_images and schedule.batch_norm == "fold":
        allowed = "0 with schedule.batch_norm=fold, which leaves no BatchNorm (freeze and train keep it)"
        raise ConfigError("schedule.batch_norm_images", schedule.batch_norm_images, allowed)
    if schedule.batch_norm_images == 1:
        allowed = "0, or 2 or higher: of one image a BatchNorm has no variance"
        raise ConfigError("schedule.batch_norm_images", 1, allowed)
    if schedule.relative_lr and schedule.optimizer != "adamw":
        allowed = (
            "false with schedule.optimizer=sgd, whose steps follow the size of the gradient (adamw has it)"
        )
        raise ConfigError("schedule.relative_lr", True, allowed)
    trains = schedule.epochs > 0 or config.rescue.climb
    if config.verify.every is not None and not trains:
        allowed = "null with schedule.epochs=0, which leaves nothing to choose between"
        raise ConfigError("verify.every", config.verify.every, allowed)
    for key in ("distill_teacher", "distill_checkpoint"):
        if getattr(schedule, key) is not None and not (schedule.distill or schedule.distill_features):
            allowed = (
                "null without schedule.distill above 0 or schedule.distill_features, which learn from it"
            )
            raise ConfigError(f"schedule.{key}", getattr(schedule, key), allowed)
    if schedule.distill_features and config.algorithm_choice == "auto":
        allowed = "[] with algorithm_choice=auto: what it keeps may rescale the channels that are compared"
        raise ConfigError("schedule.distill_features", ", ".join(schedule.distill_features), allowed)


def _check_search(config: Config) -> None:
    """Checks a search, whose trials are runs of this process with comparable figures."""
    asked = config.search
    if asked.trials == 0:
        if asked.space:
            raise ConfigError("search.trials", 0, "1 or more with a search.space (search=optuna: 30)")
        return
    axes(asked.space)
    check_objectives(asked.objectives)
    constraints(asked.constraints)
    url = None if asked.storage == "journal" else asked.storage
    if url is not None and ("://" not in url or _in_memory(url)):
        allowed = (
            "null (SQLite in the study's folder), journal, or a database's URL: postgresql://user@host/name"
        )
        lost = ": a study in memory ends with its worker" if "://" in url else ""
        raise ConfigError("search.storage", _without_password(url), allowed + lost)
    without = _without_password(asked.storage or "")
    if without != (asked.storage or ""):  # it would be in every run's config.yaml and report
        allowed = "a URL without a password: PGPASSWORD or ~/.pgpass has it"
        raise ConfigError("search.storage", without, allowed)
    for key, value, allowed_values in (
        ("rescue.climb", config.rescue.climb, (False,)),
        ("trainer.devices", config.trainer.devices, (1,)),
        ("trainer.num_nodes", config.trainer.num_nodes, (1,)),
        ("resume", config.resume, (None, "auto")),
    ):
        if value not in allowed_values:
            allowed = " or ".join(_shown(one) for one in allowed_values)
            raise ConfigError(key, value, f"{allowed} with search.trials={asked.trials}")


def _in_memory(url: str) -> bool:
    """Returns whether a URL is that of an SQLite database in memory."""
    driver, _, rest = url.partition("://")
    path, _, query = rest.partition("?")
    without = path.strip("/") in ("", ":memory:") or path.startswith("/file::memory:")
    return driver.partition("+")[0].lower() == "sqlite" and (without or "mode=memory" in query)


def _without_password(url: str) -> str:
    """Returns a URL with `***` where SQLAlchemy would read a password: after the user, up to the last `@`, or
    in the query.
    """
    url = re.sub(r"(?<=://)[^:/@]*:.*@", "***@", url)
    return re.sub(r"([?&;][^=&;]*(?:password|passwd|pwd))=[^&;]*", r"\1=***", url, flags=re.IGNORECASE)


def _names(chosen: Mapping[str, Any]) -> str:
    return ",".join(chosen) or "none"


def _check_export(config: Config) -> None:
    """Checks the export mode: ONNX Runtime's tools take the float model, so nothing is trained and input and
    output stay float.
    """
    if config.export.io == "uint8" and config.data.layout == "nhwc":
        allowed = (
            "float32 with data.layout=nhwc: the file would normalise uint8 pixels by a convolution over NCHW"
        )
        raise ConfigError("export.io", "uint8", allowed)
    mode = config.export.mode
    if mode == "static":
        return
    if config.onnx is not None:
        raise ConfigError("export.mode", mode, "static: with onnx=FILE it is mode=MODE that chooses")
    if config.schedule.epochs > 0:
        allowed = f"0 with export.mode={mode}, which takes the float model (schedule=calibrate_only)"
        raise ConfigError("schedule.epochs", config.schedule.epochs, allowed)
    for key, value, needed in (
        ("verify.control", config.verify.control, False),
        ("export.io", config.export.io, "float32"),
        ("export.weights_for_amx", config.export.weights_for_amx, False),
        ("calibration.cache", config.calibration.cache, None),
        ("calibration.random", config.calibration.random, False),
        ("algorithm", _names(config.algorithm) if config.algorithm_choice == "all" else "none", "none"),
        ("quantizer.activation", config.quantizer.activation, QuantizerConfig().activation),
        ("quantizer.weight", config.quantizer.weight, QuantizerConfig().weight),
        *_analysis_off(config.analysis),
    ):
        if value != needed:
            raise ConfigError(key, value, f"{_shown(needed)} with export.mode={mode}")
    if config.data.features_in == "graph":
        allowed = f"data with export.mode={mode}, which leaves no features float"
        raise ConfigError("data.features_in", "graph", allowed)
    if config.backend.reduce_range is True and mode in ("float16", "weight_only"):
        raise ConfigError(
            "backend.reduce_range", True, f"false with export.mode={mode}, which multiplies in float"
        )
    refuse_selectors(config.backend, f"export.mode={mode}")


def _check_weights(config: Config) -> None:
    """Checks the settings of low-bit weights, which only apply to a given file; train.py uses a backend instead."""
    asked = config.weights
    if asked.bits is not None and config.mode != "weight_only":
        allowed = "null without onnx=FILE mode=weight_only (train.py takes backend=weight_only)"
        raise ConfigError("weights.bits", asked.bits, allowed)
    for key in ("block", "symmetric", "scale_dtype") if asked.bits is None else ():
        if getattr(asked, key) is not None:
            reason = "the number of bits is missing; add weights.bits=4, for example"
            raise ConfigError(f"weights.{key}", getattr(asked, key), reason=reason)


def _check_bundle(config: Config) -> None:
    """Checks that a bundle does not need libraries, which it cannot hold."""
    named = config.model.name.startswith("onnx/") and "custom_ops" in config.model.kwargs
    if config.export.bundle and named:
        allowed = "false with model.kwargs.custom_ops: whoever receives the bundle has no such library"
        raise ConfigError("export.bundle", True, allowed)


def _analysis_off(asked: AnalysisConfig) -> list[tuple[str, object, object]]:
    """Returns the analyses that must be off for a file that is not made from a module: they need the simulation."""
    return [
        ("analysis.isolation", asked.isolation, False),
        ("analysis.sensitivity", asked.sensitivity, "none"),
        ("analysis.tensors", asked.tensors, 0),
    ]


def _check_low_bits(config: Config) -> None:
    """Checks low-bit types: without an int8 kernel in ONNX Runtime they run in float, and the audit would
    always fail.
    """
    packed, overrides = config.export.pack_int4, config.backend.overrides
    if packed and config.export.opset < 21:
        raise ConfigError("export.opset", config.export.opset, "21 to 23 with export.pack_int4=true")
    seen = (None, *WHOLE, *WIDE, *FORMAT_NAMES)  # the audit recognizes them in the file
    narrow = [pattern for pattern, one in overrides.items() if one.activation_dtype not in seen]
    key = "export.pack_int4=true"
    if config.backend.activation_dtype not in seen:
        narrow, key = ["backend"], f"backend.activation_dtype={config.backend.activation_dtype}"
    elif narrow:
        key = f"backend.overrides.{narrow[0]}.activation_dtype={overrides[narrow[0]].activation_dtype}"
    if config.verify.audit and (packed or narrow) and config.export.mode == "static":
        raise ConfigError("verify.audit", True, f"false with {key}, which no int8 kernel computes")


def _check_16_bits(config: Config) -> None:
    """Rejects choices by latency, which mean nothing if the runtime computes the model in float, and 8-bit
    inputs and outputs.
    """
    wide, narrow = config.backend.activation_dtype in WIDE, config.backend.bias_dtype in NARROW_BIASES
    if not wide and not narrow:
        return
    name = "activation_dtype" if wide else "bias_dtype"
    for key, value, needed in (
        ("placement", config.placement, "fixed"),
        ("precision.search", config.precision.search, "none"),
        ("export.io", config.export.io, "float32"),
    ):
        if value != needed and (wide or key != "export.io"):
            raise ConfigError(key, value, f"{needed} with backend.{name}={getattr(config.backend, name)}")


def _shown(value: object) -> str:
    """Returns a value as it is typed."""
    return "null" if value is None else str(value).lower()


def _check_axes(config: Config) -> None:
    """Checks free axes and streaming: a given ONNX file keeps its axes, and chunks need a free axis and a
    file made from a module.
    """
    wanted, name = config.export.dynamic_axes, config.model.name
    of_file = config.onnx is not None or name.startswith("onnx/")
    if wanted != "none" and of_file:
        raise ConfigError("export.dynamic_axes", wanted, "none with an ONNX file, which keeps its own axes")
    if not config.export.stream:
        return
    if of_file:
        raise ConfigError("export.stream", True, "false with an ONNX file, which has its own inputs")
    for key, value, refused, allowed in (
        ("export.mode", config.export.mode, config.export.mode != "static", "static"),
        ("export.io", config.export.io, config.export.io != "float32", "float32"),
        ("data.features_in", config.data.features_in, config.data.features_in == "graph", "data"),
        ("export.dynamic_axes", wanted, wanted == "none", "auto or {input: {2: frames}}"),
    ):
        if refused:
            raise ConfigError(key, value, f"{allowed} with export.stream=true")


def _check_encodings(config: Config) -> None:
    """Checks fixed encodings: they need quantizers, and nothing else may choose the type of a tensor."""
    path = config.calibration.encodings
    if path is None:
        return
    mode = config.export.mode if config.onnx is None else config.mode
    if mode not in ("static", "weight_only") or (mode == "weight_only" and config.onnx is None):
        raise ConfigError("calibration.encodings", path, f"null with mode={mode}, which calibrates nothing")
    if config.precision.search != "none":
        allowed = "none with calibration.encodings, which have the type of each tensor"
        raise ConfigError("precision.search", config.precision.search, allowed)
    if not Path(path).is_file():
        raise ConfigError("calibration.encodings", path, "a file that exists")


def _check_table(config: Config) -> None:
    """Checks the TensorRT table, whose ranges must belong to the float file with exactly the weights that
    were calibrated.
    """
    release = config.export.tensorrt_table
    if release is None:
        return
    if not release.isdecimal():
        raise ConfigError("export.tensorrt_table", release, 'digits of a release: "8601" for 8.6.1')
    for key, value, needed in (
        ("export.mode", config.export.mode, "static"),
        ("schedule.epochs", config.schedule.epochs, 0),
        ("algorithm", _names(config.algorithm), "none"),
    ):
        if value != needed:
            allowed = f"{_shown(needed)} with export.tensorrt_table, whose ranges are the float file's"
            raise ConfigError(key, value, allowed)


def _check_preprocessing(data: DataConfig) -> None:
    """Checks that the resize covers the crop, and that there is one mean and one standard deviation per channel."""
    if data.resize is not None and data.image_size is not None and not covers(data.resize, data.image_size):
        raise ConfigError("data.resize", data.resize, f"data.image_size={data.image_size} or higher")
    for key, values in (("data.mean", data.mean), ("data.std", data.std)):
        if values is not None and not (len(values) in (1, 3) and all(map(math.isfinite, values))):
            raise ConfigError(key, values, "one number per channel: 1 (grey) or 3 (RGB)")
    if data.pixels != LEVELS and (data.mean is None) != (data.std is None):
        raise ConfigError("data.std", data.std, f"null or numbers, as data.mean={data.mean}")
    if data.std is not None and min(data.std) <= 0:
        raise ConfigError("data.std", data.std, "numbers above 0")
