"""The backend of a run, with the changes that its configuration makes. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qatkit.algorithms.base import algorithms_of
from qatkit.config.schema import BackendConfig, Config, OverrideConfig
from qatkit.quant.backends import Backend
from qatkit.quant.granularity import granularity_of
from qatkit.quant.spec import FEW_BITS, FORMAT_NAMES, WHOLE, WIDE, QuantSpec
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError, as_typed


def backend_of(config: Config) -> Backend:
    """Returns the backend that `config.backend` names, with the changes that this group makes.

    Raises:
        ConfigError: `backend.target` is not a Backend, `export.pack_int4` has no weights to pack, or settings
            of the group conflict.
    """
    backend = resolve(config.backend.target, "backend.target")
    if not isinstance(backend, Backend):
        raise ConfigError(
            "backend.target", config.backend.target, "the dotted path of a qatkit.quant.backends.Backend"
        )
    for name in ("asks_for_int8", "broken_pairs") if backend.other_runtime else ():
        resolve(f"{backend.other_runtime}.{name}", "backend.target (other_runtime)")
    _check_formats(config, backend)
    backend = replace(backend, weight=_weight(backend.weight, config.backend))
    if backend.weights_alone:
        _check_weights_alone(config)
    if backend.weights_alone or (backend.other_runtime and not backend.integer_biases):
        _check_float_biases(config)
    if config.backend.activation_dtype is not None:
        backend = backend.with_activations(config.backend.activation_dtype)
    if config.backend.activation_symmetric is not None:
        activation = replace(backend.activation, symmetric=config.backend.activation_symmetric)
        backend = replace(backend, activation=activation)
    kind = config.backend.scale_type or backend.activation.scale_type
    _check_scales(config, kind)
    activation, weight = (replace(one, scale_type=kind) for one in (backend.activation, backend.weight))
    backend = replace(backend, activation=activation, weight=weight)
    if backend.other_runtime:
        _check_other_runtime(config, backend)
    if config.backend.every_operator:
        backend = backend.everywhere()
    dtypes = {backend.weight.dtype, *(one.weight_dtype for one in config.backend.overrides.values())}
    if config.export.pack_int4 and dtypes.isdisjoint(FEW_BITS):
        kinds = ", ".join(FEW_BITS)
        allowed = f"false without weights of {kinds} (backend.overrides.PATTERN.weight_dtype sets them)"
        raise ConfigError("export.pack_int4", True, allowed)
    return backend.reduced(config.backend.reduce_range)


def _check_scales(config: Config, usual: str) -> None:
    """Rejects a scale type that conflicts with uint8 pixels, or with scales that are quantized themselves.

    Args:
        usual: the scale type that applies without an override.
    """
    whole = config.backend
    for place, one in _settings(whole):
        kind, dtype = one.scale_type or usual, one.weight_scale_dtype or whole.weight_scale_dtype
        if kind == "float" or dtype != "uint8":
            continue
        if one.weight_scale_dtype == "uint8":
            allowed = f"float32 or float16 with scale_type={kind}, since uint8 scales cannot be restricted"
            raise ConfigError(f"{place}.weight_scale_dtype", dtype, allowed)
        raise ConfigError(f"{place}.scale_type", kind, "null or float with backend.weight_scale_dtype=uint8")
    if usual != "float" and config.export.io != "float32":
        allowed = f"float32 with backend.scale_type={usual}, since the scale of pixels is 1/255"
        raise ConfigError("export.io", config.export.io, allowed)


def _check_weights_alone(config: Config) -> None:
    """Rejects settings that quantize activations, or that a weight-only backend applies anyway."""
    for key, value, needed, why in (
        (
            "backend.reduce_range",
            config.backend.reduce_range,
            ("auto", False),
            "which multiplies in float",
        ),
        ("backend.activation_dtype", config.backend.activation_dtype, (None,), "whose activations are float"),
        (
            "backend.activation_symmetric",
            config.backend.activation_symmetric,
            (None,),
            "whose activations are float",
        ),
        ("backend.every_operator", config.backend.every_operator, (False,), "whose activations are float"),
        ("export.io", config.export.io, ("float32",), "whose activations are float"),
        ("export.pack_int4", config.export.pack_int4, (False,), "which packs weights anyway"),
    ):
        if value not in needed:
            wanted = "null" if needed[0] is None else str(needed[0]).lower()
            raise ConfigError(key, value, f"{wanted} with this backend, {why}")
    for pattern, override in config.backend.overrides.items():
        for name, value in vars(override).items():
            if name.startswith("activation_") and value is not None:
                key = f"backend.overrides.{pattern}.{name}"
                raise ConfigError(key, value, "null with this backend, whose activations are float")


def _check_float_biases(config: Config) -> None:
    """Rejects integer biases on a backend that supports only float biases."""
    for place, one in _settings(config.backend):
        if one.bias_dtype not in (None, "float"):
            allowed = f"null or float with {config.backend.target}, which only supports float biases"
            raise ConfigError(f"{place}.bias_dtype", one.bias_dtype, allowed)


def _check_other_runtime(config: Config, backend: Backend) -> None:
    """Rejects `activation_symmetric=false`, and 16-bit integers if the backend's runtime has at most 8 bits."""
    for place, one in _settings(config.backend):
        if one.activation_symmetric is False:
            allowed = f"null or true with {config.backend.target}, which does not support zero points"
            raise ConfigError(f"{place}.activation_symmetric", False, allowed)
        for key in ("activation_dtype", "weight_dtype"):
            if (value := getattr(one, key)) in WIDE and not backend.sixteen_bits:
                allowed = (
                    f"null or {', '.join(WHOLE)} with {config.backend.target}, which supports at most 8 bits"
                )
                raise ConfigError(f"{place}.{key}", value, allowed)


# Settings that have no meaning for number formats, or that inspect integers, with their required values.
_OF_INTEGERS: tuple[tuple[str, object], ...] = (
    ("backend.weight_granularity", None),
    ("backend.weight_symmetric", None),
    ("backend.activation_symmetric", None),
    ("backend.weight_scale_dtype", None),
    ("backend.scale_type", None),
    ("backend.bias_dtype", None),
    ("backend.every_operator", False),
    ("algorithm_choice", "all"),
    ("calibration.search", "none"),
    ("precision.search", "none"),
    ("schedule.oscillation", "ignore"),
    ("quantizer.activation", "qatkit.quant.fake_quantize.FakeQuantize"),
    ("quantizer.weight", "qatkit.quant.weight_fake_quantize.WeightFakeQuantize"),
    ("analysis.tensors", 0),
    ("analysis.sensitivity", "none"),
    ("export.io", "float32"),
    ("export.pack_int4", False),
    ("export.weights_for_amx", False),
    ("export.tensorrt_table", None),
)


def _check_formats(config: Config, backend: Backend) -> None:
    """Rejects number formats on an integer backend; with backend=simulated, integers and settings that need them.

    Raises:
        ConfigError: a setting does not suit the backend; the first one is reported.
    """
    for key, dtype in _dtypes(config.backend):
        if dtype is not None and (dtype in FORMAT_NAMES) != backend.simulated:
            formats, integers = (
                f"one of {', '.join(FORMAT_NAMES)}",
                "an integer type (only backend=simulated has number formats)",
            )
            raise ConfigError(
                key, dtype, f"{formats} with backend=simulated" if backend.simulated else integers
            )
    if not backend.simulated:
        return
    _check_no_scales(config.backend)
    for key, needed in _OF_INTEGERS:
        group, _, name = key.partition(".")
        value = getattr(getattr(config, group), name) if name else getattr(config, group)
        if value != needed:
            allowed = as_typed(needed) + (" (quantizer=fake_quantize)" if group == "quantizer" else "")
            raise ConfigError(
                key, value, f"{allowed} with backend=simulated, whose number formats are not integers"
            )
    _check_takes_formats(config)


def _check_takes_formats(config: Config) -> None:
    """Rejects algorithms and observers that need integers."""
    for name, algorithm in algorithms_of(config.algorithm).items():
        if not algorithm.formats:
            known = "equalize, smooth_quant, bias_correction, gptq or none"
            raise ConfigError(
                "algorithm", name, f"{known} with backend=simulated; other algorithms need integers"
            )
    if config.calibration.observer not in _OBSERVERS:
        allowed = f"one of {', '.join(_OBSERVERS)} with backend=simulated; other observers need integers"
        raise ConfigError("calibration.observer", config.calibration.observer, allowed)


def _check_no_scales(asked: BackendConfig) -> None:
    """Rejects settings of overrides that only apply to integers, such as fixed scales and ranges."""
    names = [f"{of}_{what}" for of in ("weight", "activation") for what in ("scale", "zero_point", "range")]
    for pattern, override in asked.overrides.items():
        for name in (*names, "weight_axis", "activation_reduce_range", "scale_type", "bias_dtype"):
            if (value := getattr(override, name)) is not None:
                key = f"backend.overrides.{pattern}.{name}"
                raise ConfigError(
                    key, value, "null with backend=simulated, whose number formats are not integers"
                )


_OBSERVERS = tuple(
    f"qatkit.quant.observers.{name}"
    for name in (
        "MinMaxObserver",
        "MovingAverageMinMaxObserver",
        "PercentileObserver",
        "DistributionObserver",
    )
)


def _dtypes(asked: BackendConfig) -> Iterator[tuple[str, str | None]]:
    """Yields the requested number types, each with its key."""
    for key, one in _settings(asked):
        yield f"{key}.weight_dtype", one.weight_dtype
        yield f"{key}.activation_dtype", one.activation_dtype


def _settings(asked: BackendConfig) -> Iterator[tuple[str, BackendConfig | OverrideConfig]]:
    """Yields the settings of the group and of each override, each with its key."""
    yield "backend", asked
    for pattern, override in asked.overrides.items():
        yield f"backend.overrides.{pattern}", override


def _weight(spec: QuantSpec, asked: BackendConfig) -> QuantSpec:
    """Returns the spec of weights with the changes that the group makes; `Backend.reduced` sets `pairs` later."""
    spec = replace(spec, pairs=False)
    if asked.weight_dtype is not None:
        spec = replace(spec, dtype=asked.weight_dtype)
    if asked.weight_granularity is not None:
        spec = replace(spec, granularity=granularity_of(asked.weight_granularity))
    if asked.weight_scale_dtype is not None:
        spec = replace(spec, scale_dtype=asked.weight_scale_dtype)
    if asked.bias_dtype is not None:
        spec = replace(spec, bias_dtype=asked.bias_dtype)
    return spec if asked.weight_symmetric is None else replace(spec, symmetric=asked.weight_symmetric)
