"""Computes the signal-to-noise ratio of an array against another."""

from __future__ import annotations

from typing import Any

import numpy as np


def sqnr(wanted: Any, got: Any) -> float:
    """Returns the signal-to-noise ratio in dB; infinity for equal arrays.

    It is -infinity if the shapes differ or the error is not finite.
    """
    a, b = np.asarray(wanted, np.float64), np.asarray(got, np.float64)
    if a.shape != b.shape:
        return float("-inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return float("inf")
    a, b = np.where(same, np.nan_to_num(a), a), np.where(same, np.nan_to_num(a), b)
    noise, signal = np.sum((a - b) ** 2), np.sum(a**2)
    return float(10 * np.log10(max(signal, 1e-300) / noise)) if np.isfinite(noise) else float("-inf")
