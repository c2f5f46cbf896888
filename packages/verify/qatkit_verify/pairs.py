"""Finds the int8 weights for which the sum of two products exceeds 16 bits for some activations.

On x86 processors without VNNI, two neighbouring uint8 x int8 products are added in 16 bits and clipped
(vpmaddubsw). An activation is at most 255. A pair can therefore only overflow if 255 times the sum of its
positive, or of its negative, weights exceeds 16 bits. This takes two weights of the same sign whose absolute
sum is 129 or more.

On ARM processors without the dot product, two int8 x int8 products are added in 16 bits (smull, smlal), and
only the sum of two products -128 * -128 exceeds them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOW, HIGH = -(2**15), 2**15 - 1  # the limits to which a sum is clipped
BYTE = 255  # the largest activation


def overflowing(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns the pairs that exceed 16 bits for some activations.

    Args:
        rows: int8 [N, K], one row per output channel, in the order in which the kernel multiplies.

    Returns:
        Bool [N, ceil(K / 2)]; an odd K is padded with a zero.
    """
    wide = rows.astype(np.int32)
    pairs = np.pad(wide, [(0, 0), (0, wide.shape[1] % 2)]).reshape(len(wide), (wide.shape[1] + 1) // 2, 2)
    most, least = (BYTE * np.clip(pairs, *ends).sum(-1) for ends in ((0, None), (None, 0)))
    return np.asarray((most > HIGH) | (least < LOW))


def overflowing_channels(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns the channels, bool [N], with a pair that overflows on x86, for rows as in `overflowing`."""
    return np.asarray(overflowing(rows).any(1))


def overflowing_on_arm(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns the channels, bool [N], of int8 [N, K] that may overflow on ARM.

    They have at least two weights of -128, which need not be neighbours.
    """
    return np.asarray((rows == -128).sum(1) > 1)


def convolution_rows(weight: NDArray[Any]) -> NDArray[Any]:
    """Returns a convolution's weight [M, C, ...] as rows [M, K]: position by position, all C channels of each."""
    return np.moveaxis(weight, 1, -1).reshape(len(weight), math.prod(weight.shape[1:]))


def product_rows(weight: NDArray[Any]) -> NDArray[Any]:
    """Returns a matrix product's second operand [..., K, N] as rows [..., N, K]; a vector is one column."""
    return weight[None] if weight.ndim == 1 else np.swapaxes(weight, -1, -2)
