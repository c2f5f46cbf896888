"""Float32 rounded to an element of fewer bits: to the nearest, of two to the one with an even mantissa.

Normal numbers are rounded on their bits: half a step, less one bit where the mantissa is even, is added, a carry goes
into the exponent by itself, and what is below a step is cut off. Denormals are rounded by the addition of a power of
two whose own spacing in float32 is theirs. Both are exact, on every device, and need no logarithm.

    beyond the largest    the largest, or infinity (`Element.saturates`); halfway to the next number counts as beyond
    infinities            the same
    NaN                   NaN, for any element: in blocks no element is one (`qatkit.quant.formats.blocks`)
    negative zero         itself; 0 of an integer
    float32's denormals   as any number: those of bfloat16 are among them
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
