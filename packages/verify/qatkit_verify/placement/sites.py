"""A placement, as what is another in it than in the backend's table."""

from __future__ import annotations

from dataclasses import dataclass

FIXED, MEASURED, VARIANTS = "fixed", "measured", "variants"  # what may be asked for in place of a file


@dataclass(frozen=True)
class Sites:
    """Operators by their paths.

    Attributes:
        floats: those that are float.
        opened: SiLUs that are int8 operators (Sigmoid and Mul), where the table has one float operator.
    """

    floats: frozenset[str] = frozenset()
    opened: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.floats or self.opened)
