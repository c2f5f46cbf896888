"""Equations between sizes that torch's exporter has no solution for.

A sum of a pooled and a strided branch asks for equal sizes, h / 4 and (h / 2) // 2: an image that the model takes has
them, whatever its height. The exporter (torch 2.13) solves such equations to suggest other constraints, and ends where
sympy can't; of an axis that may have any size (`Dim.DYNAMIC`) a size that is fixed after all is found before that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qatkit.export.replaced import replaced


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
