"""The rules for combining the settings of one override."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from qatkit.config.schema import OverrideConfig
from qatkit.config.selectors import INPUT, TENSOR
from qatkit.quant.spec import DTYPES, WHOLE
from qatkit_verify.errors import ConfigError, as_typed

KINDS = ("float", "int8")
_POSITIVE = "a normal float32 number above 0"
_RANGE = "[LOW, HIGH], two finite numbers with LOW <= 0 <= HIGH and LOW < HIGH"


def check_override(key: str, selector: str, override: OverrideConfig) -> None:
    """Rejects wrong values, and settings that contradict each other, before the model is loaded.

    Args:
        key: the key of the override, as it is typed.
        selector: the selector of the override.
        override: the settings.

    Raises:
        ConfigError: a setting is not allowed; the first one is reported.
    """
    specs = {name: value for name, value in vars(override).items() if name not in KINDS and value is not None}
    chosen = [kind for kind in KINDS if getattr(override, kind)]
    if len(chosen) + bool(specs) != 1:
        given = dict.fromkeys(chosen, True) | specs
        allowed = "either float: true, or int8: true, or at least one other setting"
        raise ConfigError(key, given, allowed)
    if chosen and selector.startswith((TENSOR, INPUT)):
        allowed = "false for a tensor, which has no such setting; select the operator that produces it"
        raise ConfigError(f"{key}.{chosen[0]}", True, allowed)
    if override.reduce_range is True and override.weight_dtype not in (None, *WHOLE):
        allowed = (
            f"null with weight_dtype={override.weight_dtype}, since only int8 weights have a reduced range"
        )
        raise ConfigError(f"{key}.reduce_range", True, allowed)
    for of in ("weight", "activation"):
        _check_fixed(key, of, specs)
    axis, granularity = override.weight_axis, override.weight_granularity
    if axis is not None and granularity not in (None, "per_channel"):
        allowed = (
            f"null with weight_granularity={as_typed(granularity)}, whose scales do not lie along an axis"
        )
        raise ConfigError(f"{key}.weight_axis", axis, allowed)


def _check_fixed(key: str, of: str, specs: Mapping[str, Any]) -> None:
    """Rejects a scale, zero point or range of a wrong type or value, and combinations that exclude each other."""
    scale, zero, ends = (specs.get(f"{of}_{name}") for name in ("scale", "zero_point", "range"))
    for name, given in (("scale", scale), ("zero_point", zero)):
        several = of == "weight" and isinstance(given, Sequence) and not isinstance(given, str)
        listed = list(given) if several else [given]  # type: ignore[arg-type]
        fits = _is_scale if name == "scale" else _is_whole
        if given is not None and not (listed and all(map(fits, listed))):
            one = _POSITIVE if name == "scale" else "an integer"
            allowed = f"{one}, or a list of them, one per output channel" if of == "weight" else one
            raise ConfigError(f"{key}.{of}_{name}", given, allowed)
        if several and given is not None and specs.get("weight_granularity") == "per_tensor":
            raise ConfigError(
                f"{key}.{of}_{name}", given, "a single number with weight_granularity=per_tensor"
            )
    if zero is not None and scale is None:
        reason = f"a zero point needs a scale; add {of}_scale, or set {of}_range instead"
        raise ConfigError(f"{key}.{of}_zero_point", zero, reason=reason)
    if ends is not None and scale is not None:
        allowed = f"null with {of}_scale={scale}, which determines the range"
        raise ConfigError(f"{key}.{of}_range", ends, allowed)
    if ends is not None and not _is_range(ends):
        raise ConfigError(f"{key}.{of}_range", ends, _RANGE)
    if zero is not None:
        _check_zero_point(key, of, specs)


def _check_zero_point(key: str, of: str, specs: Mapping[str, Any]) -> None:
    """Rejects a zero point outside the range of its type, or together with `symmetric`, which implies one."""
    zero, dtype = specs[f"{of}_zero_point"], specs.get(f"{of}_dtype")
    if specs.get(f"{of}_symmetric"):
        allowed = f"null with {of}_symmetric=true, whose zero point is the middle of the type's range"
        raise ConfigError(f"{key}.{of}_zero_point", zero, allowed)
    if dtype in DTYPES:
        low, high = DTYPES[dtype].low, DTYPES[dtype].high
        listed = zero if isinstance(zero, Sequence) else [zero]
        if not all(low <= one <= high for one in listed):
            raise ConfigError(
                f"{key}.{of}_zero_point", zero, f"an integer from {low} to {high}, the range of {dtype}"
            )


def _is_scale(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 1.2e-38 < value < 3.4e38  # the range of normal float32 numbers


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_range(ends: Any) -> bool:
    if not isinstance(ends, Sequence) or isinstance(ends, str) or len(ends) != 2:
        return False
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in ends):
        return False
    return all(map(math.isfinite, ends)) and ends[0] <= 0 <= ends[1] and ends[0] < ends[1]
