"""A tensor in a number format: the scales of its blocks, and the values that it is rounded to.

Blocks are neighbours along the axis over which a product sums; the last block may be shorter. In this table v
are the values of a block, and `amax` is its largest absolute value. `qatkit.quant.formats.table` defines
elements and scales.

    no scale    round(v)
    float32     round(v / s) · s       s of the tensor: its range over the largest element
    E8M0        round(v / s) · s       s = 2^(floor(log2(amax)) - emax), at least 2^-127
    E4M3        round(v / (s·t)) · s·t t of the tensor: its range over 448 · 6; s = round(amax / 6 / t), at least 2^-9

Rounding to elements saturates, except to float16 and bfloat16. Where the specifications leave a choice or a gap:

- MX uses this scale (specification, section 6.3), so that the largest values of a block may exceed the
  largest element and saturate (for MXFP4, values between 6 and 8 times the scale). A scale below 2^-127 becomes
  2^-127; no scale is above 2^127.
- A block of zeros has the smallest scale and stays zeros, with their signs unless elements are integers.
- A block with an infinity or a NaN has the scale NaN (E8M0 0xFF, E4M3 0x7F), so that all its values are NaN. MX
  does not define the result; Quark's operator for BFP16 returns these values unchanged, although no shared exponent
  can represent them.
- BFP16: the shared exponent is that of the largest value, and 127 steps are the largest mantissa, as in
  Quark's operator (rounding_mode 2): a value that would round to 128 saturates. The compiler's kernel raises the
  exponent in this case.
- NVFP4: a block whose scale would round to 0 gets the smallest scale above 0. NVIDIA's paper does not define this
  case; torchao uses 2^-6, the smallest normal scale. The tensor's scale is not below 2^-126, float32's smallest
  normal number.
- The range of a tensor with a scale (`tensor_scale`) is the largest absolute value that the observer found for an
  activation, and the largest finite absolute value of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qatkit.quant.formats.elements import rounded
from qatkit.quant.formats.table import E4M3, Format, Scale
from qatkit.quant.granularity import Granularity

_LEAST_EXPONENT, _LEAST_NORMAL = -127, 2.0**-126


def tensor_scale(largest: Tensor, form: Format) -> Tensor:
    """Returns the float32 scale [] of a tensor whose largest absolute value is `largest` []."""
    return (largest.float() / form.reach).clamp(min=_LEAST_NORMAL)


def largest_finite(x: Tensor) -> Tensor:
    """Returns the largest absolute value among the finite values of `x`, []; 0 if none is finite."""
    if not x.numel():
        return x.new_zeros(())
    size = x.detach().abs()
    return torch.where(size.isfinite(), size, 0.0).amax()


def block_scales(largest: Tensor, form: Format, of_tensor: Tensor) -> Tensor:
    """Returns the factors of the elements of each block.

    Args:
        largest: the largest absolute value in each block, of any shape.
        of_tensor: the tensor's scale [], used by formats that have one.

    Returns:
        float32, of the shape of `largest`; NaN for a block with a value that is not finite.
    """
    if form.scale is Scale.E4M3:
        scale = rounded(largest / form.element.maximum / of_tensor, E4M3).clamp(min=E4M3.least) * of_tensor
    else:
        scale = _power_of_two((largest.view(torch.int32) >> 23) - 127 - form.element.largest_exponent)
    return torch.where(largest.isfinite(), scale, torch.nan)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Returns 2^exponent in float32 for integers up to 127; the smallest result is 2^-127, which is denormal."""
    bits = torch.where(exponent > _LEAST_EXPONENT, (exponent + 127) << 23, 1 << 22)
    return bits.to(torch.int32).view(torch.float32)


def scales(x: Tensor, form: Format, granularity: Granularity, of_tensor: Tensor) -> Tensor | None:
    """Returns the divisors of `x` before rounding, in the granularity's shape; None if the format has none.

    Args:
        granularity: the granularity of `form` (`Format.granularity`).
        of_tensor: the tensor's scale [], as in `block_scales`.
    """
    if form.block is None:
        return of_tensor if form.scale is Scale.FLOAT32 else None
    values, dims = granularity.grouped(x.detach().abs())
    return block_scales(values.amax(dims), form, of_tensor)


def quantized(x: Tensor, form: Format, granularity: Granularity, of_tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 `x` rounded to its format, and a mask of the values that do not saturate (`Element.limit`).

    Args:
        granularity: the granularity of `form` (`Format.granularity`).
        of_tensor: the tensor's scale [], used by formats that have one.
    """
    return rounded_by(x, form, granularity, scales(x, form, granularity, of_tensor))


def rounded_by(
    x: Tensor, form: Format, granularity: Granularity, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the same as `quantized`, for given scales in the granularity's shape (None: no scales)."""
    if scale is None:
        return rounded(x, form.element), x.detach().abs() < form.element.limit
    spread = granularity.spread(scale, x.shape)
    steps = x.detach() / spread
    return rounded(steps, form.element) * spread, steps.abs() < form.element.limit
