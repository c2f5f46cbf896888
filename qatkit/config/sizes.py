"""The limit of picture sizes: one number of pixels for a square, or [height, width].

OmegaConf supports no union of a number and a list. Such a field is therefore declared as Any, and its limit
also checks the type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import Limit
from qatkit_verify.fitting import are_sides

_LARGEST = 2**31 - 1  # the same limit as for other counts


@dataclass(frozen=True)
class Size(Limit):
    """A limit to one integer of at least 1, or a list of two."""

    def holds(self, value: Any) -> bool:
        """Returns whether `value` is an integer of at least 1, or two of them."""
        return are_sides(value, _LARGEST)

    def expected(self) -> str:
        """Returns both forms as text."""
        return "an integer of at least 1, or [height, width]"

    def hint(self, value: Any) -> str:
        """Returns the upper limit if it is exceeded, else ""."""
        return f"; the maximum is {_LARGEST}" if isinstance(value, int) and value > _LARGEST else ""

    def __str__(self) -> str:
        return "1 or higher, or [height, width]"


SIZE = Size()
