"""What a run chose of where its quantizers stand: operators that stay float, and what else a placement changes.

FloatSites   beside what the overrides say, these operators stay float; precision=auto and placement=measured choose it
Sites        a placement, as what is another in it than in the backend's table
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FIXED, MEASURED, VARIANTS = "fixed", "measured", "variants"  # what may be asked for in place of a file

# Paths of operators, in the order in which they become overrides: that of the graph, or by name. A list in JSON.
FloatSites = tuple[str, ...]


def read_float_sites(stored: Iterable[object]) -> FloatSites:
    """Reads what was written of them.

    Raises:
        ValueError, TypeError: it is something else.
    """
    found = tuple(stored)
    names = tuple(name for name in found if isinstance(name, str))
    if isinstance(stored, str) or len(names) < len(found):
        raise ValueError("sites are names of operators")
    return names


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

    @property
    def float_sites(self) -> FloatSites:
        """The operators that are float, by name."""
        return tuple(sorted(self.floats))

    def as_dict(self) -> dict[str, list[str] | bool]:
        """Plain containers."""
        stored: dict[str, list[str] | bool] = {"float": [*self.float_sites], "int8": sorted(self.opened)}
        return {**stored, "amx": True} if self.for_amx else stored

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Sites:
        """The inverse.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        floats, opened = read_float_sites(stored["float"]), read_float_sites(stored["int8"])
        if not isinstance(for_amx := stored.get("amx", False), bool):
            raise ValueError("amx is true or false")
        return cls(frozenset(floats), frozenset(opened), for_amx)
