"""Measures the difference between two outputs."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_difference(expected: Tensor, found: Tensor) -> float:
    """Returns the largest difference relative to the largest expected value.

    It is infinite if the shapes differ, or if one tensor has a NaN or an infinity where the other has a number. For
    integers, booleans and complex numbers it is 1 if any of them differs, else 0.
    """
    if expected.shape != found.shape:
        return float("inf")
    if expected.is_floating_point() and found.is_floating_point():
        found = found.to(expected.dtype)
    if not expected.is_floating_point():
        return float((expected != found).any())
    # NaNs and infinities count as equal to themselves.
    different = ~torch.isclose(expected, found, rtol=0, atol=0, equal_nan=True)
    if not different.any():
        return 0.0
    gap = (expected - found)[different].abs().double().max()
    finite = expected[expected.isfinite()].abs()
    scale = finite.max().double() if finite.numel() else torch.ones(())
    return float(gap / scale.clamp_min(1e-30)) if gap.isfinite() else float("inf")
