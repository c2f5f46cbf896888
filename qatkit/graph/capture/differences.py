"""The distance between two outputs, as captures and their proof judge it."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_difference(expected: Tensor, found: Tensor) -> float:
    """Returns the largest difference relative to the largest value.

    It is infinite for another shape, or for NaN or an infinity in place of a number. For whole numbers it is 1 if any
    differs.
    """
    if expected.shape != found.shape:
        return float("inf")
    if expected.is_floating_point() and found.is_floating_point():
        found = found.to(expected.dtype)
    if not expected.is_floating_point():
        return float((expected != found).any())
    # Infinities and NaNs are equal to themselves.
    different = ~torch.isclose(expected, found, rtol=0, atol=0, equal_nan=True)
    if not different.any():
        return 0.0
    gap = (expected - found)[different].abs().double().max()
    finite = expected[expected.isfinite()].abs()
    scale = finite.max().double() if finite.numel() else torch.ones(())
    return float(gap / scale.clamp_min(1e-30)) if gap.isfinite() else float("inf")
