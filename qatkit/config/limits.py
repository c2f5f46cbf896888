"""What values a configuration may hold, as one table of ranges and one of choices.

Hydra's schema has checked names and types when this runs; here are the limits that a type cannot say. Every
error names the key as it is typed, the value, and what is allowed, before anything long or written.
"""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qatkit.errors import ConfigError

if TYPE_CHECKING:  # config.py imports this module
    from qatkit.config.schema import Config, DataConfig, OverrideConfig


@dataclass(frozen=True)
class Range:
    """A closed interval; `above` leaves out the lower end."""

    low: float
    high: float = math.inf
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is a finite number inside."""
        inside = value > self.low if self.above else value >= self.low
        return math.isfinite(value) and inside and value <= self.high

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"{self.low:g}"
        if math.isinf(self.high):
            return low if self.above else f"{low} or higher"
        return f"{low} to {self.high:g}"


FRACTION = Range(0, 1)
COUNT = Range(1)
POSITIVE = Range(0, above=True)

RANGES = {
    "seed": Range(0, 2**32 - 1),
    "model.num_classes": COUNT,
    "data.image_size": COUNT,
    "data.resize": COUNT,
    "data.batch_size": COUNT,
    "data.eval_batch_size": COUNT,
    "data.workers": Range(0),
    "data.train_images": COUNT,
    "data.test_images": COUNT,
    "calibration.images": COUNT,
    "calibration.batch_size": COUNT,
    "calibration.percentile": Range(50, 100, above=True),
    "calibration.deviations": POSITIVE,
    "algorithm.bias_images": COUNT,
    "schedule.epochs": Range(0),
    "schedule.max_steps": COUNT,
    "schedule.lr": POSITIVE,
    "schedule.momentum": Range(0, 1),
    "schedule.weight_decay": Range(0),
    "schedule.warmup": FRACTION,
    "schedule.label_smoothing": FRACTION,
    "schedule.enable_fake_quant": FRACTION,
    "schedule.freeze_observers": FRACTION,
    "schedule.freeze_batch_norm": FRACTION,
    "schedule.distill": FRACTION,
    "schedule.distill_temperature": POSITIVE,
    "schedule.float_epochs": Range(0),
    "schedule.float_lr": POSITIVE,
    "trainer.num_nodes": COUNT,
    "trainer.gradient_clip": POSITIVE,
    "trainer.checkpoint_every": COUNT,
    "export.opset": Range(13, 23),
    "verify.threads": COUNT,
    "verify.latency_batch": COUNT,
    "verify.latency_runs": COUNT,
    "verify.parity_images": COUNT,
    "verify.max_drop": Range(-100, 100),
    "verify.min_agreement": FRACTION,
    "verify.max_size_ratio": POSITIVE,
    "verify.min_speedup": POSITIVE,
}

CHOICES = {
    "mode": ("dynamic", "static", "float16", "weight_only"),
    "calibration.weights": ("max", "mse"),
    "calibration.search": ("none", "layerwise", "tournament"),
    "export.mode": ("static", "dynamic", "float16", "weight_only"),
    "export.io": ("float32", "uint8"),
    "data.augment": ("none", "flip", "crop_flip", "resized_crop"),
    "algorithm.relu6": ("keep", "relu"),
    "algorithm.bias_correction": ("none", "analytic", "empirical"),
    "schedule.optimizer": ("sgd", "adamw"),
    "schedule.decay": ("cosine", "linear", "constant"),
    "schedule.batch_norm": ("fold", "freeze", "train"),
    "trainer.accelerator": ("auto", "cpu", "gpu", "cuda", "mps"),
    "trainer.strategy": ("auto", "ddp", "ddp_find_unused_parameters_true"),
    "trainer.precision": ("32-true", "bf16-mixed", "16-mixed"),
}

OVERRIDE_CHOICES = {
    "weight_dtype": ("int8",),
    "weight_granularity": ("per_tensor", "per_channel"),
    "activation_dtype": ("uint8", "int8"),
}


def validate(config: Config) -> None:
    """Check every value; null means "not set" and is left alone.

    Raises:
        ConfigError: the first value outside its range or choices, or two values that exclude each other.
    """
    for key, allowed in RANGES.items():
        value = operator.attrgetter(key)(config)
        if value is not None and not allowed.holds(value):
            raise ConfigError(key, value, str(allowed))
    for key, choices in CHOICES.items():
        _check_choice(key, operator.attrgetter(key)(config), choices)
    _check_run(config)
    _check_export(config)
    _check_table(config)
    _check_preprocessing(config.data)
    for pattern, override in config.backend.overrides.items():
        _check_override(f"backend.overrides.{pattern}", override)


def _check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigError(key, value, " | ".join(choices))


def _check_run(config: Config) -> None:
    if config.name in ("", ".", "..") or Path(config.name).name != config.name:
        raise ConfigError("name", config.name, "a folder's name, without a path")
    if config.trainer.devices != -1 and config.trainer.devices < 1:
        raise ConfigError("trainer.devices", config.trainer.devices, "1 or higher, or -1 for all")
    _check_cache(config.calibration.cache)
    if config.algorithm.relu6 == "relu" and not config.algorithm.equalize:
        raise ConfigError("algorithm.relu6", "relu", "keep, unless algorithm.equalize=true")


def _check_cache(cache: str | None) -> None:
    """The file is written after calibration, which may come after hours of training."""
    if cache is None:
        return
    path = Path(cache).absolute()
    folder = next(parent for parent in path.parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError("calibration.cache", cache, "a file in a folder that can be written to")


def _check_export(config: Config) -> None:
    """A mode that takes the float model as it is trains nothing and has no other ends."""
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
        ("calibration.cache", config.calibration.cache, None),
        ("calibration.random", config.calibration.random, False),
        ("algorithm.equalize", config.algorithm.equalize, False),
        ("algorithm.bias_correction", config.algorithm.bias_correction, "none"),
    ):
        if value != needed:
            raise ConfigError(key, value, f"{_shown(needed)} with export.mode={mode}")
    if config.backend.reduce_range and mode in ("float16", "weight_only"):
        raise ConfigError(
            "backend.reduce_range", True, f"false with export.mode={mode}, which multiplies in float"
        )
    if config.backend.overrides:
        raise ConfigError(
            "backend.overrides", ", ".join(config.backend.overrides), f"{{}} with export.mode={mode}"
        )


def _shown(value: bool | int | str | None) -> str:
    """A value as it is typed."""
    return "null" if value is None else str(value).lower()


def _check_table(config: Config) -> None:
    """TensorRT's table has the ranges of the float file: that of the very weights that were calibrated."""
    release = config.export.tensorrt_table
    if release is None:
        return
    if not release.isdecimal():
        raise ConfigError("export.tensorrt_table", release, 'digits of a release: "8601" for 8.6.1')
    for key, value, needed in (
        ("export.mode", config.export.mode, "static"),
        ("schedule.epochs", config.schedule.epochs, 0),
        ("algorithm.equalize", config.algorithm.equalize, False),
        ("algorithm.bias_correction", config.algorithm.bias_correction, "none"),
    ):
        if value != needed:
            allowed = f"{_shown(needed)} with export.tensorrt_table, whose ranges are the float file's"
            raise ConfigError(key, value, allowed)


def _check_preprocessing(data: DataConfig) -> None:
    """Sizes that crop, never pad, and one mean and one standard deviation for each channel."""
    if data.resize is not None and data.image_size is not None and data.resize < data.image_size:
        raise ConfigError("data.resize", data.resize, f"data.image_size={data.image_size} or higher")
    for key, values in (("data.mean", data.mean), ("data.std", data.std)):
        if values is not None and not (len(values) in (1, 3) and all(map(math.isfinite, values))):
            raise ConfigError(key, values, "one number a channel: 1 (grey) or 3 (RGB)")
    if (data.mean is None) != (data.std is None):
        raise ConfigError("data.std", data.std, f"given together with data.mean={data.mean}")
    if data.std is not None and min(data.std) <= 0:
        raise ConfigError("data.std", data.std, "numbers above 0")


def _check_override(key: str, override: OverrideConfig) -> None:
    specs = {name: value for name, value in vars(override).items() if name != "float" and value is not None}
    if override.float == bool(specs):
        given = "float and " + ", ".join(specs) if specs else "{}"
        raise ConfigError(key, given, "either float: true, or at least one of the dtype and range settings")
    for name, choices in OVERRIDE_CHOICES.items():
        _check_choice(f"{key}.{name}", getattr(override, name), choices)
