"""Tests of simplified quotients of dynamic sizes during an export, against Python's integer division."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import FloorDiv

from qatkit.export.size_constraints import quotients_divided_term_by_term

X, Y = sympy.symbols("x y", integer=True, positive=True)
CASES = {
    "sum": lambda d, x, y: d(6 * x + 9 * y, 3),
    "factor": lambda d, x, y: d(6 * x + 4, 8),
    "product": lambda d, x, y: d(x * y + x, x),
    "of sums": lambda d, x, y: d((x + 1) * (y + 2) * 4, (x + 1) * 2),
    "windows": lambda d, x, y: d(4 * d(d(x, 4) + 6, 7) + 4 * d(d(y, 8) + 6, 7), 8),
    "square": lambda d, x, y: d(x * x + 2 * x + 1, x + 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_quotient_is_the_same_number_for_every_size(case: str) -> None:
    formula: Callable[..., Any] = CASES[case]
    with quotients_divided_term_by_term():
        found = formula(FloorDiv, X, Y)
    for x, y in itertools.product((1, 2, 3, 7, 8, 31, 64), repeat=2):
        assert int(found.subs({X: x, Y: y})) == formula(lambda a, b: a // b, x, y)


def test_nothing_is_simplified_within_and_everything_behind() -> None:
    before = sympy.simplify
    with quotients_divided_term_by_term():
        assert sympy.simplify is not before
    assert sympy.simplify is before
