"""Defines which operators a run keeps in float, and what else a placement changes.

FloatSites   the operators that precision=auto or placement=measured keep in float besides the overrides
Sites        a placement, as its differences from the backend's table
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FIXED, MEASURED, VARIANTS = "fixed", "measured", "variants"  # values of `placement` that are not a file

# Paths of operators in the order in which they become overrides, which is graph order or alphabetical order.
# They are stored as a list in JSON.
FloatSites = tuple[str, ...]


def read_float_sites(stored: Iterable[object]) -> FloatSites:
    """Reads the paths of float operators from JSON.

    Raises:
        ValueError, TypeError: the value is not a list of strings.
    """
    found = tuple(stored)
    names = tuple(name for name in found if isinstance(name, str))
    if isinstance(stored, str) or len(names) < len(found):
        raise ValueError("sites are names of operators")
    return names


@dataclass(frozen=True)
class Sites:
    """The operators that a placement changes, by their paths.

    Attributes:
        floats: the operators that are float although the backend's table has them in int8.
        opened: the SiLUs that are int8 operators (Sigmoid and Mul) instead of a single float operator.
        for_amx: whether weights of convolutions are stored for AMX (`export.weights_for_amx`).
    """

    floats: frozenset[str] = frozenset()
    opened: frozenset[str] = frozenset()
    for_amx: bool = False

    def __bool__(self) -> bool:
        return bool(self.floats or self.opened or self.for_amx)

    @property
    def float_sites(self) -> FloatSites:
        """The paths of the float operators, sorted."""
        return tuple(sorted(self.floats))

    def as_dict(self) -> dict[str, list[str] | bool]:
        """Returns the sites as plain containers for JSON."""
        stored: dict[str, list[str] | bool] = {"float": [*self.float_sites], "int8": sorted(self.opened)}
        return {**stored, "amx": True} if self.for_amx else stored

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Sites:
        """Reads sites from the output of `as_dict`.

        Raises:
            ValueError, KeyError, TypeError: the record is not such an output.
        """
        floats, opened = read_float_sites(stored["float"]), read_float_sites(stored["int8"])
        if not isinstance(for_amx := stored.get("amx", False), bool):
            raise ValueError("amx must be true or false")
        return cls(frozenset(floats), frozenset(opened), for_amx)
