"""Rounding of float32 to an element of fewer bits: to nearest, ties to an even mantissa.

Normal numbers are rounded on their bits: half a step (one bit less where the mantissa is even) is added, a
carry moves into the exponent by itself, and the bits below a step are cut off. Denormals are rounded by
adding a power of two whose spacing in float32 equals theirs. Both ways are exact on every device and need no
logarithm.

    beyond the largest    the largest, or infinity (`Element.saturates`); halfway to the next counts as beyond
    infinities            the same
    NaN                   NaN, also for elements without NaN: a block with a NaN has the scale NaN (`formats.blocks`)
    negative zero         itself; 0 for integers
    float32's denormals   like any number; bfloat16's denormals are among them
"""

from __future__ import annotations

import torch
from torch import Tensor

from qatkit.quant.formats.table import Element

_MANTISSA = 23  # bits of a float32


def rounded(x: Tensor, element: Element) -> Tensor:
    """Returns float32 `x` rounded to numbers of `element`, in float32, without a gradient."""
    x = x.detach()
    size = x.abs()
    cut = _MANTISSA - element.mantissa_bits
    bits = size.view(torch.int32)
    normal = (bits + ((bits >> cut) & 1) + (2 ** (cut - 1) - 1)) & -(2**cut)
    spaced = 2.0 ** (element.least_exponent + cut)
    small = (size + spaced) - spaced
    found = torch.where(size < 2.0**element.least_exponent, small, normal.view(torch.float32))
    beyond = element.maximum if element.saturates else torch.inf
    found = torch.where(found > element.maximum, beyond, found).copysign(x)
    if element.integer:
        found = found + 0.0
    return torch.where(size.isnan(), torch.nan, found)
