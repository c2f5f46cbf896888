"""Sets scales, zero points and ranges from overrides; they stay fixed in calibration and training.

A range becomes the scale that calibration would compute from it. Values are rejected if they do not fit the type, its
symmetry or an activation after the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qatkit.config.schema import OverrideConfig
from qatkit.quant import numerics
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.held_scales import held
from qatkit.quant.recurrent_layers import QATRecurrent
from qatkit.quant.spec import QuantSpec
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize
from qatkit_verify.errors import ConfigError


def fix_activation(quantizer: FakeQuantize, pattern: str, override: OverrideConfig) -> None:
    """Fixes the quantizer of an activation to the scale and zero point, or to the range, of an override.

    An override without scale and range changes nothing.

    Raises:
        ConfigError: the values do not fit the type, its symmetry, or the ReLU that bounds the range.
    """
    scale, zero = override.activation_scale, override.activation_zero_point
    ends, key, spec = override.activation_range, f"backend.overrides.{pattern}.activation_", quantizer.spec
    if scale is None and ends is None:
        return
    _check_integers(key, scale, ends, spec)
    if ends is not None:
        low, high = (torch.tensor(float(end)) for end in ends)
        _check_bounds(f"{key}range", ends, quantizer.bounds, float(low), float(high), 0.0)
        quantizer.fix(*quantizer.qparams(low, high))
        return
    value = _scale_of(f"{key}scale", torch.tensor(float(scale)), scale, spec)
    point = _zero_point(key, zero, spec)
    low_end, high_end = ((end - point) * float(value) for end in (spec.quant_min, spec.quant_max))
    given = f"{scale}, with zero_point {point}"
    _check_bounds(f"{key}scale", given, quantizer.bounds, low_end, high_end, float(value) / 2)
    quantizer.fix(value, torch.tensor(point, dtype=torch.int32))


def fix_weight(quantizer: WeightFakeQuantize, weight: Tensor, pattern: str, override: OverrideConfig) -> None:
    """Fixes the quantizer of a weight to the scales and zero points, or to the range, of an override.

    An override without scale and range changes nothing.

    Raises:
        ConfigError: the values do not fit the weight's output channels, its type or its symmetry.
    """
    scale, zero, ends = override.weight_scale, override.weight_zero_point, override.weight_range
    key, spec = f"backend.overrides.{pattern}.weight_", quantizer.spec
    if scale is None and ends is None:
        return
    _check_integers(key, scale, ends, spec)
    shape = quantizer.clip.shape
    if ends is not None:
        low, high = (torch.full(shape, float(end)) for end in ends)
        value, zeros = numerics.choose_qparams(low, high, spec)
        value = held(value, spec)
    else:
        value = _scale_of(f"{key}scale", _spread(f"{key}scale", scale, shape), scale, spec)
        listed = list(zero) if _several(zero) else [zero]
        points = [_zero_point(key, one, spec) for one in listed]
        zeros = _spread(f"{key}zero_point", points if _several(zero) else points[0], shape)
    counted = zeros.to(weight.device, torch.int32) if spec.has_zero_point else None
    quantizer.fix(value.to(weight.device), zero_point=counted)


def fix_weights(module: nn.Module, pattern: str, override: OverrideConfig) -> None:
    """Fixes the quantizer of the weight of a Conv, Linear or Embedding (`fix_weight`).

    Raises:
        ConfigError: see `fix_weight`; or the override has a scale or range for a recurrent layer, which has several
            weights.
    """
    asked = (override.weight_scale, override.weight_range)
    if isinstance(module, QATRecurrent) and asked != (None, None):
        key = f"backend.overrides.{pattern}.weight_{'scale' if asked[1] is None else 'range'}"
        allowed = "null for a recurrent layer, which has several weights"
        raise ConfigError(key, next(one for one in asked if one is not None), allowed)
    if not isinstance(module, QATRecurrent):
        quantizer, weight = module.weight_fake_quant, module.weight
        assert isinstance(quantizer, WeightFakeQuantize) and isinstance(weight, Tensor)
        fix_weight(quantizer, weight, pattern, override)


def _check_integers(key: str, scale: Any, ends: Any, spec: QuantSpec) -> None:
    if spec.form is not None:
        name, value = ("scale", scale) if ends is None else ("range", ends)
        allowed = f"null with {spec.dtype}, whose scales are computed for each tensor or block"
        raise ConfigError(f"{key}{name}", value, allowed)


def _check_bounds(
    key: str, value: Any, bounds: tuple[float | None, float | None], low: float, high: float, slack: float
) -> None:
    """Rejects a range beyond the bounds of a ReLU or ReLU6 that the quantization replaces in the file."""
    least, most = bounds
    if (least is not None and low < least) or (most is not None and high > most + slack):
        what = "a range" if key.endswith("range") else "a scale and zero_point with a range"
        wanted = f"from {least:g}" + ("" if most is None else f" to at most {most:g}")
        reached = f"this one is from {low:.6g} to {high:.6g}"
        allowed = f"{what} {wanted}, the range of the activation after the tensor; {reached}"
        raise ConfigError(key, value, allowed)


def _scale_of(key: str, scale: Tensor, given: Any, spec: QuantSpec) -> Tensor:
    """Returns a scale in float32.

    Raises:
        ConfigError: the file cannot represent the scale exactly.
    """
    wanted = scale.float()
    if not torch.equal(held(wanted, spec), wanted):
        one, several = ("a power", "powers") if spec.powers_of_two else ("a number", "numbers")
        kind = "of two" if spec.powers_of_two else f"that {spec.scale_dtype} can represent"
        raise ConfigError(key, given, f"{several if _several(given) else one} {kind}")
    return wanted


def _zero_point(key: str, given: int | None, spec: QuantSpec) -> int:
    """Returns the given zero point, or the only one of a symmetric type.

    Raises:
        ConfigError: the zero point does not fit the type or its symmetry, or is missing for an asymmetric type.
    """
    low, high = spec.type_range
    middle = 0 if not spec.has_zero_point else (spec.quant_max + spec.quant_min + 1) // 2
    if spec.symmetric:
        if given not in (None, middle):
            allowed = f"null or {middle}, the zero_point of a symmetric {spec.dtype}"
            raise ConfigError(f"{key}zero_point", given, allowed)
        return middle
    if given is None:
        raise ConfigError(
            f"{key}zero_point", None, f"an integer from {low} to {high} in addition to the scale"
        )
    if not low <= given <= high:
        raise ConfigError(f"{key}zero_point", given, f"an integer from {low} to {high} with {spec.dtype}")
    return given


def _spread(key: str, given: Any, shape: Sequence[int]) -> Tensor:
    """Returns one number, or one number per output channel, as a tensor in the shape of the scales.

    Raises:
        ConfigError: the list has another length, or the weight does not have one scale per output channel.
    """
    if not _several(given):
        return torch.full(tuple(shape), given)
    channels = shape[0] if shape else 1
    if len(given) != channels or len(shape) != 1:
        allowed = f"one number, or a list of {channels}, one for each output channel"
        if len(shape) != 1:
            scales = f"{math.prod(shape)} scales, one for each block" if shape else "one scale"
            allowed = f"one number, because the weight has {scales}"
        raise ConfigError(key, f"{len(given)} {'number' if len(given) == 1 else 'numbers'}", allowed)
    return torch.tensor(list(given))


def _several(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)
