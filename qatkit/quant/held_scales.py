"""Storage of weight scales in the file: float32, float16, or integers with scales of their own.

    float32    unchanged
    float16    the nearest float16 above 0
    uint8      double quantization: scale = code · unit, code 1 to 255, one unit per output channel

Blocks of 32 weights of 4 bits with zero points take 5.1 bits per weight with scales in float32, 4.6 in float16 and 4.4
in uint8; blocks of 64 take 4.6, 4.3 and 4.2. A unit has 16 significant bits, so that its products with codes
are exact in float32. The scales in the file therefore equal those of the simulation bit for bit, and `held`
does not change scales that it has returned.

Source: Dettmers et al., "QLoRA: Efficient finetuning of quantized LLMs", 2023, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qatkit.quant.scale_types import nearest, rounded_up
from qatkit.quant.spec import QuantSpec

_CODES = 255
_INT32_MAX = 2**31 - 1
_LEAST_HALF, _LARGEST_HALF = 2.0**-24, 65504.0  # the ends of float16's positive values
_LOW_BITS = 0xFF  # the bits of a float32 that are 0 in a unit


def held(scale: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the scales that the file holds instead of `scale`, in float32.

    Args:
        scale: the scales, above 0, [out, blocks], [out] or []; in the last two cases all scales share one
            unit.
        spec: spec of the weight; the nearest scales of its type are taken.
    """
    scale = nearest(scale, spec)
    return scale if spec.scale_dtype == "float32" else decoded(*encoded(scale, spec.scale_dtype))


def avoid_overflow(
    scale: Tensor, bias: Tensor, input_scale: Tensor, spec: QuantSpec
) -> tuple[Tensor, Tensor | None]:
    """Raises the scales of channels whose bias would not fit int32, which leaves their weights fewer steps.

    If needed, a per-tensor scale becomes one scale per channel; the other channels keep its value. A raised
    step is 2⁻³⁰ of the bias, so that the error of a result is a few times its float32 rounding error
    (docs/decisions/0078).

    Args:
        scale: the scales of the weight, [] or [out].
        bias: the float bias, [out].
        input_scale: the scale of the operator's input, [].
        spec: spec of the weight.

    Returns:
        The scales, and a bool mask [out], true for channels with a raised scale; instead of the mask None if no
        scale was raised.
    """
    needed = bias.abs().double() / (input_scale.double() * (_INT32_MAX // 2))
    too_small = scale.double() < needed
    if not too_small.any():
        return scale, None
    needed = rounded_up(needed.to(scale.dtype), spec)
    return torch.where(too_small, needed, scale), too_small


def encoded(scale: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Returns what the file holds: scales of type `dtype`, in the shape of `scale`, and their units.

    Units have the shape [out, 1], [1] or [], and are None unless `dtype` is uint8.
    """
    if dtype == "float32":
        return scale, None
    if dtype == "float16":
        return scale.clamp(_LEAST_HALF, _LARGEST_HALF).to(torch.float16), None
    unit = scale.float().amax(-1, keepdim=scale.ndim > 0) / _CODES
    unit = ((unit.view(torch.int32) + _LOW_BITS) & ~_LOW_BITS).view(torch.float32)
    return torch.round(scale / unit).clamp(1, _CODES).to(torch.uint8), unit


def decoded(codes: Tensor, unit: Tensor | None) -> Tensor:
    """Returns float32 scales from the output of `encoded`."""
    return codes.float() if unit is None else codes.float() * unit
