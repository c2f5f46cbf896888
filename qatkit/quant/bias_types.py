"""Biases as a file holds them (`QuantSpec.bias_dtype`), counted in steps of input scale times weight scale.

    int32          whole steps, which the accumulator of the products starts from
    int16, int8    whole numbers with a scale of their own: steps times a multiplier, a whole number
    float          whole steps, written as float32

With a whole multiplier a bias of 8 or 16 bits is a whole number of steps too. So all of them are added to the
products' sums as integers, and requantization has no ties that it did not have (`qatkit.graph.scales.align`). A step
is far finer than a result's rounding, so that nothing is lost by it. Of scales that are powers of two the multiplier
is one too: hardware shifts to the left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qatkit.quant.scale_types import rounded_up
from qatkit.quant.spec import DTYPES, QuantSpec

# How many multipliers are tried, from the least by which the bias is in range.
_TRIED = 16


def whole_bias(
    bias: Tensor, step: Tensor, spec: QuantSpec, shift: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the integers of a bias, and the multiplier of the step that they count.

    Args:
        bias: [out].
        step: input scale times weight scale, [] or [out].
        spec: of the weight.
        shift: the multiplier is at most 2^shift, and what it does not hold then is clipped; None: any.

    Returns:
        Whole numbers in float64: the integers [out], and the multiplier of the shape of `step`, 1 of int32 and float.
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
    """Returns `bias` [out] as the file has it, with a straight-through gradient; the rest as `whole_bias`."""
    with torch.no_grad():
        whole, multiplier = whole_bias(bias, step, spec, shift)
        change = (whole * multiplier * step.double()).to(bias.dtype) - bias
    return bias + change


def _multiplier(steps: Tensor, one_for_all: bool, spec: QuantSpec) -> Tensor:
    """Returns the multiplier, or that of each channel, with the least squared error that clips nothing."""
    largest = steps.abs().amax() if one_for_all else steps.abs()
    high = DTYPES[spec.bias_dtype].high
    first = torch.ceil(largest / high).clamp(min=1.0)
    if spec.powers_of_two:  # a larger one has coarser steps, among them no other values
        return rounded_up(first, spec).double()
    best, least = first, torch.full_like(first, torch.inf)
    for more in range(_TRIED):
        tried = first + more
        error = (torch.round(steps / tried) * tried - steps).square()
        error = error.sum() if one_for_all else error
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best
