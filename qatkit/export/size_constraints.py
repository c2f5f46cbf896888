"""Works around two problems of torch's exporter with the arithmetic of sizes: failures, and slow simplification.

Failures: the sum of a pooled and a strided branch requires equal sizes, such as h / 4 and (h / 2) // 2. They are equal
for every image that the model accepts. The exporter (torch 2.13) solves such equations to suggest other constraints,
and fails if sympy cannot solve them. No solution is needed: if a model fixes the size of a dynamic axis
(`Dim.DYNAMIC`), the exporter reports this earlier.

Simplification: the exporter calls `sympy.simplify` for a quotient of two sizes with a common factor, and this call
expands all sizes in the quotient again. After a few windows and strides, this takes more than 15 minutes (timm's
davit_tiny). In nearly all cases, it is enough to divide each term of a sum by the factor; otherwise numerator and
denominator are cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qatkit.export.replaced import replaced


@contextmanager
def quotients_divided_term_by_term() -> Iterator[None]:
    """Divides sizes term by term within one export, instead of searching for the simplest form of a quotient."""
    import sympy  # type: ignore[import-untyped]

    def divided(quotient: Any, **_: Any) -> Any:
        terms = sympy.expand_mul(quotient, deep=False)
        whole = all(sympy.denom(term) == 1 for term in sympy.Add.make_args(terms))
        return terms if whole else sympy.cancel(quotient)

    with replaced(sympy, "simplify", divided):
        yield


@contextmanager
def unsolved_constraints_allowed() -> Iterator[None]:
    """Ignores constraints that sympy cannot solve, within one export."""
    from torch.fx.experimental import symbolic_shapes

    constraints = getattr(symbolic_shapes, "DimConstraints", None)
    solve = getattr(constraints, "solve", None)
    if constraints is None or solve is None:
        yield
        return

    def as_far_as_possible(self: Any) -> None:
        try:
            solve(self)
        except NotImplementedError:  # raised by sympy
            return

    with replaced(constraints, "solve", as_far_as_possible):
        yield
