"""Computes pads that depend on sizes: `auto_pad` of convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence

SAME = ("SAME_UPPER", "SAME_LOWER")


def same_pads(
    mode: str, sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Returns the pads (begins, then ends) with which the output has ceil(size / stride) positions.

    Args:
        mode: SAME_UPPER puts an odd element at the end, SAME_LOWER at the beginning.
        sizes: the sizes of the input's spatial axes.
        kernel, stride, dilation: one number per spatial axis.
    """
    begins, ends = [], []
    for size, k, s, d in zip(sizes, kernel, stride, dilation, strict=True):
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        small = total // 2
        low, high = (small, total - small) if mode == "SAME_UPPER" else (total - small, small)
        begins.append(low)
        ends.append(high)
    return begins + ends
