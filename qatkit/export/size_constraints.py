"""Arithmetic of sizes in torch's exporter: what it has no solution for, and what takes it minutes.

A sum of a pooled and a strided branch asks for equal sizes, h / 4 and (h / 2) // 2: an image that the model takes has
them, whatever its height. The exporter (torch 2.13) solves such equations to suggest other constraints, and ends where
sympy can't; of an axis that may have any size (`Dim.DYNAMIC`) a size that is fixed after all is found before that.

A quotient of two sizes with a common factor goes through `sympy.simplify`, which takes every part of every size in it
apart again; after a few windows and strides that is more than 15 minutes (timm's davit_tiny). To divide each term of a
sum by the factor is enough nearly always; else numerator and denominator are cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qatkit.export.replaced import replaced


@contextmanager
def quotients_divided_term_by_term() -> Iterator[None]:
    """Leaves out the search for the simplest form of a quotient of two sizes, within one export."""
    import sympy  # type: ignore[import-untyped]

    def divided(quotient: Any, **_: Any) -> Any:
        terms = sympy.expand_mul(quotient, deep=False)
        whole = all(sympy.denom(term) == 1 for term in sympy.Add.make_args(terms))
        return terms if whole else sympy.cancel(quotient)

    with replaced(sympy, "simplify", divided):
        yield


@contextmanager
def unsolved_constraints_allowed() -> Iterator[None]:
    """Leaves constraints unsolved that have no solution, within one export."""
    from torch.fx.experimental import symbolic_shapes

    constraints = getattr(symbolic_shapes, "DimConstraints", None)
    solve = getattr(constraints, "solve", None)
    if constraints is None or solve is None:
        yield
        return

    def as_far_as_possible(self: Any) -> None:
        try:
            solve(self)
        except NotImplementedError:  # sympy's
            return

    with replaced(constraints, "solve", as_far_as_possible):
        yield
