"""Which int8 weights can take the sum of two products beyond 16 bits, for all activations.

On x86 processors without VNNI two neighbouring uint8 x int8 products are added in 16 bits and clipped (vpmaddubsw). An
activation is at most 255, so a pair can only overflow where 255 times the sum of its positive, or of its negative,
weights leaves 16 bits: two weights of one sign whose sum is 129 or more.

On ARM processors without the dot product two int8 x int8 products are added in 16 bits (smull, smlal), and only twice
-128 by -128 leaves them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

LOW, HIGH = -(2**15), 2**15 - 1  # what a sum is clipped to
BYTE = 255  # the largest activation


def overflowing(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Which pairs some activations take beyond 16 bits.

    Args:
        rows: int8 [N, K], one row per output channel, in the order in which the kernel multiplies.

    Returns:
        Bool [N, ceil(K / 2)]; an odd K ends with a zero.
    """
    wide = rows.astype(np.int32)
    pairs = np.pad(wide, [(0, 0), (0, wide.shape[1] % 2)]).reshape(len(wide), (wide.shape[1] + 1) // 2, 2)
    most, least = (BYTE * np.clip(pairs, *ends).sum(-1) for ends in ((0, None), (None, 0)))
    return np.asarray((most > HIGH) | (least < LOW))


def overflowing_channels(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Bool [N]: which channels have a pair that overflows on x86; of rows as `overflowing` takes them."""
    return np.asarray(overflowing(rows).any(1))


def overflowing_on_arm(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Bool [N]: which channels of int8 [N, K] hold two weights of -128, in whatever order a kernel pairs them."""
    return np.asarray((rows == -128).sum(1) > 1)


def convolution_rows(weight: NDArray[Any]) -> NDArray[Any]:
    """The weight [M, C, ...] of a convolution as rows [M, K]: K runs over the kernel's positions, then the channels."""
    return np.moveaxis(weight, 1, -1).reshape(len(weight), math.prod(weight.shape[1:]))


def product_rows(weight: NDArray[Any]) -> NDArray[Any]:
    """The second operand [..., K, N] of a product of matrices as rows [..., N, K]; a vector is one column."""
    return weight[None] if weight.ndim == 1 else np.swapaxes(weight, -1, -2)
