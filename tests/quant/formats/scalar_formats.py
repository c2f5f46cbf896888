"""Number formats computed one value at a time, from the tables of their specifications.

Every bit pattern of an element type is decoded, and a value is rounded to the nearest decoded number. Numbers
are exact fractions, except NVFP4's scales, which are float32.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np


class Bits(NamedTuple):
    """The layout of an element type by its specification.

    `kind` says what the highest exponent encodes: infinity and NaN ("ieee"), numbers and one NaN ("nan"), or
    only numbers ("none"). `least` is the smallest positive number.
    """

    exponent: int
    mantissa: int
    bias: int
    kind: str  # "ieee", "nan", "none"
    maximum: float
    least: float


# From OFP8 1.0, table 1; MX 1.0, tables 1 to 6; IEEE 754 for float16; bfloat16 has float32's exponent.
ELEMENTS = {
    "float16": Bits(5, 10, 15, "ieee", 65504.0, 2.0**-24),
    "bfloat16": Bits(8, 7, 127, "ieee", 2.0**127 * 1.9921875, 2.0**-133),
    "float8_e4m3fn": Bits(4, 3, 7, "nan", 448.0, 2.0**-9),
    "float8_e5m2": Bits(5, 2, 15, "ieee", 57344.0, 2.0**-16),
    "float6_e2m3fn": Bits(2, 3, 1, "none", 7.5, 0.125),
    "float6_e3m2fn": Bits(3, 2, 3, "none", 28.0, 0.0625),
    "float4_e2m1fn": Bits(2, 1, 1, "none", 6.0, 0.5),
}
# Element, block size, and exponent of the largest power of two (MX 1.0, table 7) by name of the format.
BLOCKS = {
    "mxfp8_e4m3": ("float8_e4m3fn", 32, 8),
    "mxfp8_e5m2": ("float8_e5m2", 32, 15),
    "mxfp6_e2m3": ("float6_e2m3fn", 32, 2),
    "mxfp6_e3m2": ("float6_e3m2fn", 32, 4),
    "mxfp4": ("float4_e2m1fn", 32, 2),
    "mxint8": ("int8", 32, 0),
    "bfp16": ("int8", 8, 0),
}


@cache
def patterns(name: str) -> tuple[Fraction | None, ...]:
    """Returns the values of all bit patterns with sign 0, in bit order; None for infinity and NaN."""
    exponent_bits, mantissa_bits, bias, kind, *_ = ELEMENTS[name]
    found: list[Fraction | None] = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        e, m = divmod(code, 2**mantissa_bits)
        highest = e == 2**exponent_bits - 1
        if highest and (kind == "ieee" or (kind == "nan" and m == 2**mantissa_bits - 1)):
            found.append(None)
        elif e == 0:
            found.append(Fraction(m, 2**mantissa_bits) * Fraction(2) ** (1 - bias))
        else:
            found.append((1 + Fraction(m, 2**mantissa_bits)) * Fraction(2) ** (e - bias))
    return tuple(found)


def nearest(x: float, name: str) -> float:
    """Returns `x` rounded to the element type `name`.

    Beyond the type's range, 16-bit floats become infinite and others saturate.
    """
    if math.isnan(x):
        return math.nan
    if name == "int8":
        steps = 127 if math.isinf(x) else min(127, round(Fraction(abs(x)) * 64))
        return math.copysign(steps, x) / 64 if steps else 0.0
    numbers = [one for one in patterns(name) if one is not None]
    beyond = math.inf if name in ("float16", "bfloat16") else float(numbers[-1])
    if math.isinf(x):
        return math.copysign(beyond, x)
    size = Fraction(abs(x))
    last = 2 * numbers[-1] - numbers[-2]  # the number that would follow the largest
    if size >= (numbers[-1] + last) / 2:
        return math.copysign(beyond, x)
    low, high = 0, len(numbers) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if numbers[middle] <= size else (low, middle)
    below, above = size - numbers[low], numbers[high] - size
    chosen = low if below < above or (below == above and low % 2 == 0) else high
    return math.copysign(float(numbers[chosen]), x)


def block(values: list[float], name: str) -> list[float]:
    """Returns a block rounded to an MX format or to BFP16; all NaN if a value is not finite."""
    element, _, emax = BLOCKS[name]
    if not all(map(math.isfinite, values)):
        return [math.nan] * len(values)
    amax = max(map(abs, values))
    exponent = -127 if amax == 0 else min(127, max(-127, math.frexp(amax)[1] - 1 - emax))
    scale = Fraction(2) ** exponent
    made = []
    for one in values:
        divided = Fraction(one) / scale
        held = nearest(float(divided), element)  # exact: a power of two only changes the exponent
        signed_zero = math.copysign(0.0, one) if element != "int8" else 0.0
        made.append(float(Fraction(held) * scale) if held else signed_zero)
    return made


def nvfp4(values: list[float], tensor: np.float32) -> list[float]:
    """Returns a block rounded to NVFP4 with the tensor's scale `tensor`; all NaN if a value is not finite."""
    if not all(map(math.isfinite, values)):
        return [math.nan] * len(values)
    amax = np.float32(max(map(abs, values)))
    of_block = max(nearest(float(amax / np.float32(6) / tensor), "float8_e4m3fn"), 2.0**-9)
    scale = np.float32(of_block) * tensor
    held = [nearest(float(np.float32(one) / scale), "float4_e2m1fn") for one in values]
    return [float(np.float32(one) * scale) for one in held]
