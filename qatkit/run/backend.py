"""The backend of a run, as its configuration changes it. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qatkit.algorithms.base import algorithms_of
from qatkit.config.schema import BackendConfig, Config, OverrideConfig
from qatkit.quant.backends import Backend
from qatkit.quant.granularity import granularity_of
from qatkit.quant.spec import FEW_BITS, FORMAT_NAMES, WHOLE, WIDE, QuantSpec
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError


def backend_of(config: Config) -> Backend:
    """The backend that `config.backend` names, changed as the group asks.

    Raises:
        ConfigError: `backend.target` is no Backend, or `export.pack_int4` has no weights to pack.
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
    if config.backend.activation_dtype is not None:
        backend = backend.with_activations(config.backend.activation_dtype)
    if config.backend.scale_type is not None:
        backend = _with_scales(config, backend, config.backend.scale_type)
    if backend.other_runtime:
        _check_other_runtime(config)
    if config.backend.every_operator:
        backend = backend.everywhere()
    dtypes = {backend.weight.dtype, *(one.weight_dtype for one in config.backend.overrides.values())}
    if config.export.pack_int4 and dtypes.isdisjoint(FEW_BITS):
        kinds = ", ".join(FEW_BITS)
        allowed = f"false without an operator of weights of {kinds} (backend.overrides.PATTERN.weight_dtype)"
        raise ConfigError("export.pack_int4", True, allowed)
    return backend.reduced(config.backend.reduce_range)


def _with_scales(config: Config, backend: Backend, kind: str) -> Backend:
    """Returns the backend with scales of a kind, which neither pixels nor scales that are quantized themselves have."""
    asked = [("backend", config.backend.weight_scale_dtype)]
    overrides = config.backend.overrides.items()
    asked += [(f"backend.overrides.{name}", one.weight_scale_dtype) for name, one in overrides]
    for place, dtype in asked if kind == "pow2" else ():
        if dtype == "uint8":
            allowed = (
                "float32 or float16 with backend.scale_type=pow2: products of integers are no powers of two"
            )
            raise ConfigError(f"{place}.weight_scale_dtype", dtype, allowed)
    if kind == "pow2" and config.export.io != "float32":
        allowed = "float32 with backend.scale_type=pow2: pixels have steps of 1/255"
        raise ConfigError("export.io", config.export.io, allowed)
    activation, weight = (replace(one, scale_type=kind) for one in (backend.activation, backend.weight))
    return replace(backend, activation=activation, weight=weight)


def _check_weights_alone(config: Config) -> None:
    """Refuses what quantizes activations, or is done anyway."""
    for key, value, needed, why in (
        (
            "backend.reduce_range",
            config.backend.reduce_range,
            ("auto", False),
            "whose products are of floats",
        ),
        ("backend.activation_dtype", config.backend.activation_dtype, (None,), "whose activations are float"),
        ("backend.every_operator", config.backend.every_operator, (False,), "whose activations are float"),
        ("export.io", config.export.io, ("float32",), "whose activations are float"),
        ("export.pack_int4", config.export.pack_int4, (False,), "which packs weights anyway"),
    ):
        if value not in needed:
            wanted = "null" if needed[0] is None else str(needed[0]).lower()
            raise ConfigError(key, value, f"{wanted} with this backend, {why}")
    for pattern, override in config.backend.overrides.items():
        if override.activation_dtype is not None or override.activation_symmetric is not None:
            key = f"backend.overrides.{pattern}"
            raise ConfigError(
                key, "activation_*", "settings of weights with this backend, whose activations are float"
            )


def _check_other_runtime(config: Config) -> None:
    """Refuses integers of 16 bits, which no other runtime of the backends takes."""
    asked: dict[str, BackendConfig | OverrideConfig] = {"backend": config.backend}
    asked |= {f"backend.overrides.{name}": one for name, one in config.backend.overrides.items()}
    for place, one in asked.items():
        for key in ("activation_dtype", "weight_dtype"):
            if (value := getattr(one, key)) in WIDE:
                allowed = (
                    f"null or {', '.join(WHOLE)} with {config.backend.target}, which takes 8 bits at most"
                )
                raise ConfigError(f"{place}.{key}", value, allowed)


# What has no meaning without integers, or looks at them: key, and what it has to be.
_OF_INTEGERS: tuple[tuple[str, object], ...] = (
    ("backend.weight_granularity", None),
    ("backend.weight_symmetric", None),
    ("backend.weight_scale_dtype", None),
    ("backend.scale_type", None),
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
    """Refuses number formats where a backend has integers, integers where it has formats, and what counts integers.

    Raises:
        ConfigError: the first setting that does not fit.
    """
    for key, dtype in _dtypes(config.backend):
        if dtype is not None and (dtype in FORMAT_NAMES) != backend.simulated:
            formats, integers = (
                f"one of {', '.join(FORMAT_NAMES)}",
                "an integer type (backend=simulated has others)",
            )
            raise ConfigError(
                key, dtype, f"{formats} with backend=simulated" if backend.simulated else integers
            )
    if not backend.simulated:
        return
    for key, needed in _OF_INTEGERS:
        group, _, name = key.partition(".")
        value = getattr(getattr(config, group), name) if name else getattr(config, group)
        if value != needed:
            allowed = "null" if needed is None else str(needed).lower()
            raise ConfigError(key, value, f"{allowed} with backend=simulated, whose numbers are no integers")
    for name, algorithm in algorithms_of(config.algorithm).items():
        if not algorithm.formats:
            known = "equalize, smooth_quant, bias_correction, gptq or none"
            raise ConfigError("algorithm", name, f"{known} with backend=simulated: others count integers")
    if config.calibration.observer not in _OBSERVERS:
        allowed = f"one of {', '.join(_OBSERVERS)} with backend=simulated: others count integers"
        raise ConfigError("calibration.observer", config.calibration.observer, allowed)


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
    """Yields the number types that are asked for, each with its key."""
    settings: list[tuple[str, BackendConfig | OverrideConfig]] = [("backend", asked)]
    settings += [(f"backend.overrides.{pattern}", override) for pattern, override in asked.overrides.items()]
    for key, one in settings:
        yield f"{key}.weight_dtype", one.weight_dtype
        yield f"{key}.activation_dtype", one.activation_dtype


def _weight(spec: QuantSpec, asked: BackendConfig) -> QuantSpec:
    """Returns the default of weights as the group changes it."""
    if asked.weight_dtype is not None:
        spec = replace(spec, dtype=asked.weight_dtype)
    if asked.weight_granularity is not None:
        spec = replace(spec, granularity=granularity_of(asked.weight_granularity))
    if asked.weight_scale_dtype is not None:
        spec = replace(spec, scale_dtype=asked.weight_scale_dtype)
    return spec if asked.weight_symmetric is None else replace(spec, symmetric=asked.weight_symmetric)
