"""The rules for combining export settings (mode, number types, axes, ...) with the other settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qatkit.config.schema import AnalysisConfig, Config, QuantizerConfig
from qatkit.config.selectors import refuse_selectors
from qatkit.quant.spec import FORMAT_NAMES, NARROW_BIASES, WHOLE, WIDE
from qatkit_verify.errors import ConfigError, as_typed


def check_export(config: Config) -> None:
    """Checks every rule of this module.

    Raises:
        ConfigError: two values exclude each other.
    """
    _check_weights(config)
    _check_mode(config)
    _check_bundle(config)
    _check_low_bits(config)
    _check_16_bits(config)
    _check_table(config)
    _check_axes(config)
    _check_encodings(config)


def _names(chosen: Mapping[str, Any]) -> str:
    return ",".join(chosen) or "none"


def _check_mode(config: Config) -> None:
    """Rejects settings that the export mode excludes.

    All modes except static convert the float model, so nothing is trained, and inputs and outputs stay float.
    """
    if config.export.io == "uint8" and config.data.layout == "nhwc":
        allowed = (
            "float32 with data.layout=nhwc, since uint8 pixels are normalised by a convolution over NCHW"
        )
        raise ConfigError("export.io", "uint8", allowed)
    mode = config.export.mode
    if mode == "static":
        return
    if config.onnx is not None:
        raise ConfigError(
            "export.mode", mode, "static with onnx=FILE, where mode=MODE chooses the export mode"
        )
    if config.schedule.epochs > 0:
        allowed = (
            f"0 with export.mode={mode}, which converts the float model without "
            "training (schedule=calibrate_only)"
        )
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
            typed = " (quantizer=fake_quantize)" if key.startswith("quantizer.") else ""
            raise ConfigError(key, value, f"{as_typed(needed)}{typed} with export.mode={mode}")
    if config.data.features_in == "graph":
        allowed = f"data with export.mode={mode}, which would convert the features as well"
        raise ConfigError("data.features_in", "graph", allowed)
    if config.backend.reduce_range is True and mode in ("float16", "weight_only"):
        raise ConfigError(
            "backend.reduce_range", True, f"false with export.mode={mode}, which multiplies in float"
        )
    refuse_selectors(config.backend, f"export.mode={mode}")


def _check_weights(config: Config) -> None:
    """Checks `weights`, which only applies to onnx=FILE mode=weight_only; train.py has backend=weight_only instead."""
    for key, value in vars(config.weights).items():
        if value is not None and config.mode != "weight_only":
            allowed = "null without onnx=FILE mode=weight_only (with train.py, use backend=weight_only)"
            raise ConfigError(f"weights.{key}", value, allowed)
        if value is not None and config.weights.bits is None:
            reason = "the number of bits is missing; add weights.bits=4, for example"
            raise ConfigError(f"weights.{key}", value, reason=reason)


def _check_bundle(config: Config) -> None:
    """Rejects a bundle of a model that needs libraries of custom operators, since a bundle cannot include them."""
    named = config.model.name.startswith("onnx/") and "custom_ops" in config.model.kwargs
    if config.export.bundle and named:
        allowed = "false with model.kwargs.custom_ops, since a bundle does not include these libraries"
        raise ConfigError("export.bundle", True, allowed)


def _analysis_off(asked: AnalysisConfig) -> list[tuple[str, object, object]]:
    """Returns (key, value, value that turns it off) of the analyses that need simulated quantization."""
    return [
        ("analysis.isolation", asked.isolation, False),
        ("analysis.sensitivity", asked.sensitivity, "none"),
        ("analysis.tensors", asked.tensors, 0),
    ]


def _check_low_bits(config: Config) -> None:
    """Rejects packed int4 weights before opset 21, and `verify.audit` with low-bit types in static mode.

    ONNX Runtime has no int8 kernels for these types and computes in float, which the audit would report.
    """
    packed, overrides = config.export.pack_int4, config.backend.overrides
    if packed and config.export.opset < 21:
        raise ConfigError("export.opset", config.export.opset, "21 to 23 with export.pack_int4=true")
    seen = (None, *WHOLE, *WIDE, *FORMAT_NAMES)  # types that the audit recognizes in the file
    narrow = [pattern for pattern, one in overrides.items() if one.activation_dtype not in seen]
    key = "export.pack_int4=true"
    if config.backend.activation_dtype not in seen:
        narrow, key = ["backend"], f"backend.activation_dtype={config.backend.activation_dtype}"
    elif narrow:
        key = f"backend.overrides.{narrow[0]}.activation_dtype={overrides[narrow[0]].activation_dtype}"
    if config.verify.audit and (packed or narrow) and config.export.mode == "static":
        raise ConfigError("verify.audit", True, f"false with {key}, for which there is no int8 kernel")


def _check_16_bits(config: Config) -> None:
    """Rejects settings that do not suit 16-bit activations or narrow biases.

    placement and precision.search choose by latency, which is meaningless because the runtime computes such a
    model in float. 16-bit activations also exclude 8-bit inputs and outputs.
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


def _check_axes(config: Config) -> None:
    """Checks dynamic axes and streaming.

    The inputs and axes of a given ONNX file cannot be changed, so both settings exclude such a file. Streaming
    also needs export.mode=static, float inputs and outputs, no features in the graph, and dynamic axes.
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
    """Checks the file of fixed encodings: it must exist, and the mode must be one that calibrates.

    precision.search is rejected, since it would choose types of tensors that the encodings fix.
    """
    path = config.calibration.encodings
    if path is None:
        return
    key, mode = ("export.mode", config.export.mode) if config.onnx is None else ("mode", config.mode)
    if mode not in ("static", "weight_only") or (mode == "weight_only" and config.onnx is None):
        raise ConfigError("calibration.encodings", path, f"null with {key}={mode}, which calibrates nothing")
    if config.precision.search != "none":
        allowed = "none with calibration.encodings, which fix the type of each tensor"
        raise ConfigError("precision.search", config.precision.search, allowed)
    if not Path(path).is_file():
        raise ConfigError("calibration.encodings", path, "a file that exists")


def _check_table(config: Config) -> None:
    """Checks the TensorRT table: it belongs to the original float model, so nothing may change the weights."""
    release = config.export.tensorrt_table
    if release is None:
        return
    if not release.isdecimal():
        raise ConfigError(
            "export.tensorrt_table", release, 'the digits of a TensorRT release, such as "8601" for 8.6.1'
        )
    for key, value, needed in (
        ("export.mode", config.export.mode, "static"),
        ("schedule.epochs", config.schedule.epochs, 0),
        ("algorithm", _names(config.algorithm), "none"),
    ):
        if value != needed:
            allowed = f"{as_typed(needed)} with export.tensorrt_table, which has ranges of the unchanged float model"
            raise ConfigError(key, value, allowed)
