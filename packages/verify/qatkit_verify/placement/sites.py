"""A placement, as what is another in it than in the backend's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIXED, MEASURED, VARIANTS = "fixed", "measured", "variants"  # what may be asked for in place of a file


@dataclass(frozen=True)
class Sites:
    """Operators by their paths.

    Attributes:
        floats: those that are float.
        opened: SiLUs that are int8 operators (Sigmoid and Mul), where the table has one float operator.
        for_amx: whether weights of convolutions are stored for AMX (`export.weights_for_amx`).
    """

    floats: frozenset[str] = frozenset()
    opened: frozenset[str] = frozenset()
    for_amx: bool = False

    def __bool__(self) -> bool:
        return bool(self.floats or self.opened or self.for_amx)

    def as_dict(self) -> dict[str, list[str] | bool]:
        """Plain containers."""
        stored: dict[str, list[str] | bool] = {"float": sorted(self.floats), "int8": sorted(self.opened)}
        return {**stored, "amx": True} if self.for_amx else stored

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Sites:
        """The inverse.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        names = [*stored["float"], *stored["int8"]]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("sites are names of operators")
        if not isinstance(for_amx := stored.get("amx", False), bool):
            raise ValueError("amx is true or false")
        return cls(frozenset(stored["float"]), frozenset(stored["int8"]), for_amx)
