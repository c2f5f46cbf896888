"""Tests, by brute force, of finding weight pairs that can overflow 16 bits.

What overflows is the sum of their products with two uint8 activations.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from qatkit_verify.pairs import overflowing


def test_every_pair_against_the_corners_of_the_activations() -> None:
    weights = np.array(list(product(range(-128, 128), repeat=2)), np.int8)
    corners = np.array(list(product((0, 255), repeat=2)), np.int64)
    sums = weights.astype(np.int64) @ corners.T
    found = overflowing(weights)[:, 0]
    np.testing.assert_array_equal(found, ((sums > 32767) | (sums < -32768)).any(1))
    assert not found[(np.abs(weights.astype(int)) <= 64).all(1)].any()  # the range that `reduce_range` leaves


def test_same_sign_and_a_sum_of_129_or_more() -> None:
    rows = np.array([[64, 65, 127, 1, -64, -65, -128, 127, 127]], np.int8)
    np.testing.assert_array_equal(overflowing(rows), [[True, False, True, False, False]])


def test_depths_odd_and_zero() -> None:
    assert overflowing(np.full((2, 3), 127, np.int8)).tolist() == [[True, False]] * 2
    assert overflowing(np.zeros((2, 0), np.int8)).shape == (2, 0)
    assert overflowing(np.zeros((0, 4), np.int8)).shape == (0, 2)
