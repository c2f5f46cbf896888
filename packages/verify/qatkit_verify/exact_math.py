"""Computes a logarithm and a cosine that are bit-identical on every machine, in NumPy and in JavaScript.

Mathematical libraries differ in the last bit between versions and CPUs. Here each value is a chain of float64
sums, products and quotients in a fixed order, each rounded by itself as IEEE 754 defines.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

PI, LN2, ROOT_HALF = 3.141592653589793, 0.6931471805599453, 0.7071067811865476
_LOG_TERMS, _COS_TERMS = 11, 14


def natural_log(values: Doubles) -> Doubles:
    """Returns the logarithm of positive normal numbers, to within 3e-16 times the larger of 1 and |ln x|.

    With x = m 2^e, m in [sqrt(1/2), sqrt(2)) and s = (m - 1) / (m + 1):
    ln x = e ln 2 + 2 (s + s^3/3 + s^5/5 + ...).
    """
    part, exponent = np.frexp(values)
    small = part < ROOT_HALF
    part, exponent = np.where(small, part * 2.0, part), np.where(small, exponent - 1, exponent)
    ratio = (part - 1.0) / (part + 1.0)
    square = ratio * ratio
    total = np.full_like(square, 1.0 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, -1, -1):
        total = total * square + 1.0 / (2 * term + 1)
    return np.asarray(exponent * LN2 + 2.0 * ratio * total)


def cosine_of_turns(numerator: NDArray[np.int64], denominator: int) -> Doubles:
    """Returns cos(2 pi numerator / denominator) for integers, within 3e-15, by its Taylor series."""
    turned = numerator % denominator
    nearest = np.minimum(turned, denominator - turned)  # cos(-x) = cos(x)
    angle = nearest * (2.0 * PI / denominator)
    square = angle * angle
    total = np.ones_like(square)
    for term in range(_COS_TERMS, 0, -1):
        total = 1.0 - total * square / ((2 * term - 1) * (2 * term))
    return total
