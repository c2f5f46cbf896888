"""Scales that are powers of two, for hardware that requantizes by shifts (`QuantSpec.scale_type`).

    activation   of a histogram: the exponent, of four around that of the float scale, and the zero point, of three,
                 with the least squared error; of a range alone: the next power of two, so that nothing is clipped
    weight       the exponent of each scale, of four around that of the float scale, with the least squared error

A sum of integers times a power of two is exact in float32 below 2²⁴, ties included, which all runtimes round to even,
so scales are not aligned (decision 75). Kernels of sums and products add the zero point before they round, and
QuantizeLinear adds it afterwards. Both round ties alike if the zero point is even, so all zero points are even.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qatkit.quant import numerics
from qatkit.quant.pairs import fitted
from qatkit.quant.spec import QuantSpec

_FRACTION, _EXPONENT = 0x7FFFFF, 0x7F800000  # the bits of a positive float32
_TRIED = (
    1.0,
    2.0,
    0.5,
    4.0,
)  # times the power of two that is not above the float scale; of equal ones the first


def rounded_up(scale: Tensor) -> Tensor:
    """Returns the least powers of two that are not below `scale`, float32 above 0."""
    return ((scale.float().contiguous().view(torch.int32) + _FRACTION) & _EXPONENT).view(torch.float32)


def rounded_down(scale: Tensor) -> Tensor:
    """Returns the largest powers of two that are not above `scale`, float32 above 0."""
    return (scale.float().contiguous().view(torch.int32) & _EXPONENT).view(torch.float32)


def nearest(scale: Tensor) -> Tensor:
    """Returns the powers of two that are nearest to `scale`, float32 above 0, by their ratio."""
    return rounded_down(scale * math.sqrt(2))


def qparams(low: Tensor, high: Tensor, spec: QuantSpec, *, fixed: bool = False) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a range, as `numerics.choose_qparams` has them, with the next power of two.

    Args:
        low, high: of rank 0.
        spec: the target range.
        fixed: the range is that of a function (a Sigmoid's 0..1): its end may be one step beyond the largest integer,
            which costs the values beside it a step at most, where all others would lose half of theirs.
    """
    low, high = torch.clamp(low.float(), max=0.0), torch.clamp(high.float(), min=0.0)
    if spec.symmetric:
        width, steps = torch.maximum(-low, high), spec.quant_max - _middle(spec)
        scale = rounded_up((width / (steps + fixed)).clamp(min=numerics.MIN_SCALE))
        return scale, torch.full_like(scale, _middle(spec), dtype=torch.int32)
    steps = spec.quant_max - spec.quant_min
    # Of two ends one step is left, so that an even zero point is among those by which neither is clipped.
    divisor = torch.where(low < 0.0, steps - 1, steps + fixed)
    scale = rounded_up(((high / 2 - low / 2) / divisor * 2).clamp(min=numerics.MIN_SCALE))
    at_low, at_high = spec.quant_min - low / scale, spec.quant_max - high / scale
    return scale, _even(torch.where(low < 0.0, (at_low + at_high) / 2, at_low), spec)


def range_of(
    points: Tensor, shares: Tensor, ends: tuple[float, float], spec: QuantSpec
) -> tuple[float, float]:
    """Returns the range whose `qparams` have the least squared error around those of another range.

    Args:
        points, shares: values [n] and how much each of them weighs.
        ends: the other range.
        spec: the target range.
    """
    low, high = min(ends[0], 0.0), max(ends[1], 0.0)
    first = float(rounded_down(numerics.choose_qparams(torch.tensor(low), torch.tensor(high), spec)[0]))
    best, least = (low, high), math.inf
    for scale in (first * factor for factor in _TRIED):
        for zero in _zero_points(low, high, scale, spec):
            q = (points / scale).round_().clamp_(spec.type_range[0] - zero, spec.type_range[1] - zero)
            error = float(q.mul_(scale).sub_(points).square_() @ shares)
            if error < least:
                best, least = _ends(scale, zero, spec), error
    return best


@torch.no_grad()
def weight_scale(weight: Tensor, wanted: Tensor, spec: QuantSpec, ends: numerics.Ends) -> Tensor:
    """Returns the powers of two around `wanted`, of its shape, that leave the least squared error.

    Args:
        weight: of an operator.
        wanted: the float scales, of the granularity's shape.
        spec: of the weight.
        ends: the least and the largest integer, as `numerics.weight_ends` has them.
    """
    weight, first = weight.detach(), rounded_down(wanted)
    best, least = first, torch.full_like(first, torch.inf)
    for scale in (first * factor for factor in _TRIED):
        spread = spec.granularity.spread(scale, weight.shape)
        steps = weight / spread
        q = numerics.clamped(torch.round(steps), ends)
        q = fitted(q, steps) if spec.guards_pairs else q
        values, dims = spec.granularity.grouped((q * spread).sub_(weight).square_())
        error = values.sum(dims)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def _ends(scale: float, zero: int, spec: QuantSpec) -> tuple[float, float]:
    """Returns the range of which `qparams` are these."""
    low, high = spec.quant_min - zero, spec.quant_max - zero
    if spec.symmetric:
        return -high * scale, high * scale
    return (0.0, high * scale) if low == 0 else ((low + 0.5) * scale, (high - 0.5) * scale)


def _zero_points(low: float, high: float, scale: float, spec: QuantSpec) -> list[int]:
    """Returns those by which a range ends at the least, at the largest and at both ends alike."""
    if spec.symmetric:
        return [_middle(spec)]
    at_low, at_high = spec.quant_min - low / scale, spec.quant_max - high / scale
    found = torch.tensor([at_low, at_high, (at_low + at_high) / 2] if low < 0.0 else [at_low])
    return [int(one) for one in _even(found, spec)]


def _even(zero: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the even zero points that are nearest."""
    return (torch.round(zero / 2) * 2).clamp(spec.quant_min, spec.quant_max - 1).to(torch.int32)


def _middle(spec: QuantSpec) -> int:
    """Returns the integer of zero in a symmetric range."""
    return (spec.quant_max + spec.quant_min + 1) // 2
