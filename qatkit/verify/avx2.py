"""Exact emulation of uint8 x int8 products on x86 without VNNI, where sums of pairs are clipped to 16 bits.

    with VNNI      a0 w0 + a1 w1 + a2 w2 + a3 w3                          in 32 bits
    without (MLAS) clip(a0 w0 + a1 w1) + clip(a2 w2 + a3 w3)               vpmaddubsw, then vpmaddwd and vpaddd

A pair consists of two neighbours along the depth K of the matrix product, the even one first. For a
convolution, K runs over the kernel's positions and, innermost, over the channels of the group. Bytes are
multiplied as stored; the zero points are subtracted afterwards in 32 bits. Padding is the input's zero point.
An odd depth is padded with a zero.

Few pairs of weights can overflow (`qatkit_verify.pairs`); all others are exact for any activations. The
effect of the pairs that can overflow is computed separately:

    emulated = exact + sum over these pairs of (clip(p) - p), where p is the exact sum of a pair's products
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit_verify.pairs import BYTE, HIGH, LOW, overflowing

_EXACT_FLOAT32 = 2**24  # float32 adds smaller integers exactly, in any order

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int32]


@dataclass(frozen=True)
class PairedWeight:
    """The int8 weight of one matrix product.

    Attributes:
        values: the weights, int8 [N, K], one row per output channel, in the order in which kernels multiply.
    """

    values: NDArray[np.int8]

    @cached_property
    def overflowing(self) -> NDArray[np.bool_]:
        """The pairs that exceed 16 bits for some activations, bool [N, ceil(K / 2)]."""
        return overflowing(self.values)

    def products(self, columns: Bytes) -> Integers:
        """Returns the exact sums, int32 [N, P], for activations [K, P] as stored."""
        largest = BYTE * np.abs(self.values.astype(np.int64)).sum(1).max(initial=0)
        wide: type[Any] = np.float32 if largest < _EXACT_FLOAT32 else np.float64
        return np.asarray(self.values.astype(wide) @ columns.astype(wide), np.int32)

    def clipped(self, columns: Bytes) -> Integers:
        """Returns what clipping adds to the exact sums, int32 [N, P]; 0 where nothing saturates."""
        found = np.zeros((len(self.values), columns.shape[1]), np.int32)
        for pair in np.flatnonzero(self.overflowing.any(0)):
            first, second = (columns[i].astype(np.int32) for i in (2 * pair, 2 * pair + 1))
            # Weights reach -128: activation sums below 256 never exceed 16 bits, and most activations are
            # small.
            places = np.flatnonzero(first + second >= -(LOW // 128))
            if not places.size:
                continue
            channels = np.flatnonzero(self.overflowing[:, pair])
            w0, w1 = self.values[channels, 2 * pair : 2 * pair + 2].astype(np.int32).T[:, :, None]
            sums = w0 * first[places] + w1 * second[places]
            found[np.ix_(channels, places)] += np.clip(sums, LOW, HIGH) - sums
        return found
