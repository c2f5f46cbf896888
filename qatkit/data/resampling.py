"""Resampling of sound to another sampling rate."""

from __future__ import annotations

from math import gcd

import numpy as np

from qatkit_verify.sound_files import Samples

# The filter has 20 coefficients for each step of the larger rate, after both rates are divided by their common factor.
_LARGEST_STEP = 2**18


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Returns samples resampled from `rate` to `wanted`, both in Hz, by a polyphase filter.

    Raises:
        ValueError: the greatest common divisor of the rates is so small that the filter would be too long.
    """
    if rate == wanted:
        return samples
    common = gcd(rate, wanted)
    up, down = wanted // common, rate // common
    if max(up, down) > _LARGEST_STEP:
        raise ValueError(f"{rate} Hz cannot be resampled to {wanted} Hz")
    from scipy.signal import resample_poly  # takes a second to import

    return resample_poly(samples.astype(np.float64), up, down).astype(np.float32)  # type: ignore[no-any-return]
