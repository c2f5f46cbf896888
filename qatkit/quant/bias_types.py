"""Types of biases in the file (`QuantSpec.bias_dtype`), in steps of input scale times weight scale.

    int32          whole steps, the start value of the products' accumulator
    int16, int8    integers with a scale of their own: the step times an integer multiplier
    float          whole steps, written as float32

With an integer multiplier, a bias of 8 or 16 bits is a whole number of steps too. Every bias is thus added to
the products' sums as an integer, so it causes no further ties when results are rounded (`qatkit.graph.scales.align`).
A step is far finer than the rounding of a result, so whole steps lose nothing. If scales are powers of two, the
multiplier is also a power of two, so that hardware shifts to the left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qatkit.quant.scale_types import rounded_up
from qatkit.quant.spec import DTYPES, QuantSpec

# Number of multipliers tried, from the smallest with which the bias is in range.
_TRIED = 16


def whole_bias(
    bias: Tensor, step: Tensor, spec: QuantSpec, shift: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the integers of a bias and the multiplier of their step.

    Args:
        bias: the float bias, [out].
        step: input scale times weight scale, [] or [out].
        spec: spec of the weight.
        shift: for scales that are powers of two, the base-2 logarithm of the largest multiplier; a bias that does
            not fit is clipped. None: no limit.

    Returns:
        Whole numbers in float64: the integers [out], and the multiplier in the shape of `step`. The
        multiplier is 1 for int32 and float.
    """
    steps = bias.detach().double() / step.double()
    if not spec.narrow_bias:
        return torch.round(steps), torch.ones_like(step, dtype=torch.float64)
    multiplier = _multiplier(steps, step.ndim == 0, spec)
    if shift is not None and spec.powers_of_two:
        multiplier = multiplier.clamp(max=2.0**shift)
    high = DTYPES[spec.bias_dtype].high
    return torch.round(steps / multiplier).clamp(-high, high), multiplier


def rounded_bias(bias: Tensor, step: Tensor, spec: QuantSpec, shift: int | None = None) -> Tensor:
    """Returns `bias` [out] rounded as in the file, with a straight-through gradient; see `whole_bias` for Args."""
    with torch.no_grad():
        whole, multiplier = whole_bias(bias, step, spec, shift)
        change = (whole * multiplier * step.double()).to(bias.dtype) - bias
    return bias + change


def _multiplier(steps: Tensor, one_for_all: bool, spec: QuantSpec) -> Tensor:
    """Returns the multiplier with the least error that clips nothing, for each channel or (`one_for_all`) for all."""
    largest = steps.abs().amax() if one_for_all else steps.abs()
    high = DTYPES[spec.bias_dtype].high
    first = torch.ceil(largest / high).clamp(min=1.0)
    if spec.powers_of_two:  # a larger multiplier only has coarser steps
        return rounded_up(first, spec).double()
    best, least = first, torch.full_like(first, torch.inf)
    for more in range(_TRIED):
        tried = first + more
        error = (torch.round(steps / tried) * tried - steps).square()
        error = error.sum() if one_for_all else error
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best
