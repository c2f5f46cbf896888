"""Types of restricted scales (`QuantSpec.scale_type`), and the choice of a scale for a tensor.

    pow2       powers of two, for hardware that requantizes by shifts
    float16    numbers of float16, for hardware that stores scales in it; below 2⁻¹⁴ they have fewer bits, and
               2⁻²⁴ is the smallest
    int16      a 15-bit integer times a power of two, for hardware that multiplies and shifts

The choice starts from the float scale:

    activation   with a histogram: of the scales near the float scale, each with up to three zero points, the
                 combination with the least squared error; with only a range: the next larger scale, so that
                 nothing is clipped
    weight       for each float scale, the allowed scale near it with the least squared error

A sum of integers times a power of two is exact in float32 below 2²⁴, ties included, which all runtimes round
to even. Kernels of sums and products add the zero point before they round, and QuantizeLinear adds it
afterwards. Both round ties alike if the zero point is even, so all zero points used with powers of two are
even (decision 75). Restricted scales are not aligned (`qatkit.graph.scales.align`), since alignment would
change them to other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qatkit.quant import numerics
from qatkit.quant.pairs import fitted
from qatkit.quant.spec import QuantSpec

_FRACTION, _EXPONENT = 0x7FFFFF, 0x7F800000  # the bits of a positive float32
_LEAST_HALF, _NORMAL_HALF, _LARGEST_HALF = 2.0**-24, 2.0**-14, 65504.0  # limits of float16's positive values
# A range is stored a little smaller than its scale, so that float32 rounding never leads to a larger scale.
_WITHIN = 1 - 2.0**-18


def _significant(bits: int) -> Callable[[Tensor, bool], Tensor]:
    """Returns a function that rounds to `bits` significant bits, up or down."""
    dropped = (1 << (24 - bits)) - 1

    def rounded(scale: Tensor, up: bool) -> Tensor:
        held = scale.float().contiguous().view(torch.int32)
        return ((held + dropped if up else held) & ~dropped).view(torch.float32)

    return rounded


_power = _significant(1)
_fifteen_bits = _significant(15)
_eleven_bits = _significant(11)


def _half(scale: Tensor, up: bool) -> Tensor:
    scale = scale.float().clamp(_LEAST_HALF, _LARGEST_HALF)
    units = scale / _LEAST_HALF
    below = (torch.ceil(units) if up else torch.floor(units)) * _LEAST_HALF
    return torch.where(scale < _NORMAL_HALF, below, _eleven_bits(scale, up)).clamp(max=_LARGEST_HALF)


@dataclass(frozen=True)
class ScaleType:
    """A set of allowed scales.

    Attributes:
        rounded: a function that rounds float32 scales above 0 up (true) or down to the next allowed scales.
        factors: factors of the rounded-down scale to try; the first of equally good ones is used. Empty: the
            rounded-down and the rounded-up scale are tried.
    """

    rounded: Callable[[Tensor, bool], Tensor]
    factors: tuple[float, ...] = ()

    def around(self, scale: Tensor) -> list[Tensor]:
        """Returns the scales to try instead of `scale`."""
        down = self.rounded(scale, False)
        return [down * factor for factor in self.factors] or [down, self.rounded(scale, True)]


_TYPES = {
    "pow2": ScaleType(_power, (1.0, 2.0, 0.5, 4.0)),
    "float16": ScaleType(_half),
    "int16": ScaleType(_fifteen_bits),
}


def rounded_up(scale: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the smallest allowed scales not below `scale`, float32 above 0; for float16 at most the largest."""
    return scale if spec.any_scale else _TYPES[spec.scale_type].rounded(scale, True)


def nearest(scale: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the nearest scales of the spec's type to `scale`, float32 above 0; powers of two: nearest by ratio."""
    if spec.any_scale:
        return scale
    if spec.powers_of_two:
        return _power(scale * math.sqrt(2), False)
    down, up = (_TYPES[spec.scale_type].rounded(scale, way) for way in (False, True))
    return torch.where(scale - down < up - scale, down, up)


def subnormal_scales(scale: Tensor, spec: QuantSpec) -> int:
    """Returns the number of scales that are subnormal in float16 and thus less precise; 0 for other scale types."""
    return int((scale < _NORMAL_HALF).sum()) if spec.scale_type == "float16" else 0


def qparams(low: Tensor, high: Tensor, spec: QuantSpec, *, fixed: bool = False) -> tuple[Tensor, Tensor]:
    """Returns scale and zero point of a range like `numerics.choose_qparams`, with the next larger scale of the type.

    Args:
        low, high: the ends of the range, rank 0.
        spec: spec of the tensor.
        fixed: whether the range is that of a function (a Sigmoid's 0..1). With powers of two its end may then
            be one step beyond the largest integer. This costs the values next to the end at most one step,
            whereas the next larger scale would cost all others half of their resolution.
    """
    if not spec.powers_of_two:
        scale = rounded_up(numerics.choose_qparams(low, high, spec)[0], spec)
        if spec.symmetric:
            return scale, torch.full_like(scale, _middle(spec), dtype=torch.int32)
        zero = spec.quant_min - torch.round(low.float().clamp(max=0.0) / scale)
        return scale, zero.clamp(spec.quant_min, spec.quant_max).to(torch.int32)
    low, high = torch.clamp(low.float(), max=0.0), torch.clamp(high.float(), min=0.0)
    if spec.symmetric:
        width, steps = torch.maximum(-low, high), spec.quant_max - _middle(spec)
        scale = rounded_up((width / (steps + fixed)).clamp(min=numerics.MIN_SCALE), spec)
        return scale, torch.full_like(scale, _middle(spec), dtype=torch.int32)
    steps = spec.quant_max - spec.quant_min
    # With two ends one step is left free, so that some even zero point clips neither end.
    divisor = torch.where(low < 0.0, steps - 1, steps + fixed)
    scale = rounded_up(((high / 2 - low / 2) / divisor * 2).clamp(min=numerics.MIN_SCALE), spec)
    at_low, at_high = spec.quant_min - low / scale, spec.quant_max - high / scale
    return scale, _even(torch.where(low < 0.0, (at_low + at_high) / 2, at_low), spec)


def range_of(
    points: Tensor, shares: Tensor, ends: tuple[float, float], spec: QuantSpec
) -> tuple[float, float]:
    """Returns the range with the least squared error among those with an allowed scale near the scale of `ends`.

    Args:
        points, shares: values [n] and the share of each, [n].
        ends: a range, which may have any scale.
        spec: spec of the tensor.
    """
    low, high = min(ends[0], 0.0), max(ends[1], 0.0)
    wanted = numerics.choose_qparams(torch.tensor(low), torch.tensor(high), spec)[0]
    best, least = (low, high), math.inf
    for scale in map(float, _TYPES[spec.scale_type].around(wanted)):
        for zero in _zero_points(low, high, scale, spec):
            q = (points / scale).round_().clamp_(spec.type_range[0] - zero, spec.type_range[1] - zero)
            error = float(q.mul_(scale).sub_(points).square_() @ shares)
            if error < least:
                best, least = _ends(scale, zero, spec), error
    return best


@torch.no_grad()
def weight_scale(weight: Tensor, wanted: Tensor, spec: QuantSpec, ends: numerics.Ends) -> Tensor:
    """Returns the scales of the type near `wanted`, in its shape, with the least squared error.

    Args:
        weight: the weight of an operator.
        wanted: the float scales, in the granularity's shape.
        spec: spec of the weight.
        ends: the smallest and the largest integer, as from `numerics.weight_ends`.
    """
    weight = weight.detach()
    best, least = wanted, torch.full_like(wanted, torch.inf)
    for scale in _TYPES[spec.scale_type].around(wanted):
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
    """Returns a range for which `qparams` returns this scale and zero point."""
    low, high = spec.quant_min - zero, spec.quant_max - zero
    if not spec.powers_of_two:
        low, high = (-high, high) if spec.symmetric else (low, high)
        return low * scale * _WITHIN, high * scale * _WITHIN
    if spec.symmetric:
        return -high * scale, high * scale
    return (0.0, high * scale) if low == 0 else ((low + 0.5) * scale, (high - 0.5) * scale)


def _zero_points(low: float, high: float, scale: float, spec: QuantSpec) -> list[int]:
    """Returns candidates for the zero point: the fit to the lower end, the fit to the upper end, and their mean.

    A symmetric spec, or a range that starts at 0, has only one candidate.
    """
    if spec.symmetric:
        return [_middle(spec)]
    at_low, at_high = spec.quant_min - low / scale, spec.quant_max - high / scale
    found = torch.tensor([at_low, at_high, (at_low + at_high) / 2] if low < 0.0 else [at_low])
    if not spec.powers_of_two:
        return [int(one) for one in torch.round(found).clamp(spec.quant_min, spec.quant_max)]
    return [int(one) for one in _even(found, spec)]


def _even(zero: Tensor, spec: QuantSpec) -> Tensor:
    """Returns the nearest even zero points."""
    return (torch.round(zero / 2) * 2).clamp(spec.quant_min, spec.quant_max - 1).to(torch.int32)


def _middle(spec: QuantSpec) -> int:
    """Returns the integer that represents zero in a symmetric range."""
    return (spec.quant_max + spec.quant_min + 1) // 2
