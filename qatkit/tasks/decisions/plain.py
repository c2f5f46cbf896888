"""Decisions on the first output only: argmax, threshold, equal values, cosine, or a user's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qatkit.config.fields import FRACTION, setting
from qatkit.tasks.decisions.base import KEY, Decision, MisfitError, Request, Seen
from qatkit_verify.errors import ConfigError, first_line

if TYPE_CHECKING:
    from qatkit.tasks.decisions.base import Array

ALIKE = 0.99  # cosine similarity from which two outputs for a sample count as the same


@dataclass(frozen=True)
class Argmax(Request, Decision):
    """A decision on the index of the largest value along an axis."""

    name: ClassVar[str] = "argmax"
    call: ClassVar[str] = "argmax(AXIS)"
    decides: ClassVar[bool] = True
    axis: int = setting(-1, "axis of the classes; negative ones count from the end")

    @property
    def title(self) -> str:
        return f"index of the largest value along axis {self.axis}"

    @classmethod
    def takes(cls, seen: Seen) -> bool:
        return seen.first.ndim > 1

    def fitted(self, seen: Seen) -> Decision:
        from qatkit_verify.compare import class_axis

        axes = seen.first.ndim
        axis = self.axis if self.axis >= 0 else self.axis + axes
        if not 0 < axis < axes:
            if axes < 2:
                raise MisfitError("a first output with at least two axes")
            raise MisfitError(
                f"{f'an axis from 1 to {axes - 1}' if axes > 2 else 'axis 1'} of the first output"
            )
        by_class = axis == class_axis(axes) and seen.first.shape[axis] > 1
        return _ClassArgmax(self.axis) if by_class else self

    def decide(self, output: Array) -> Array:
        best: Array = output.argmax(self.axis)
        return best


@dataclass(frozen=True)
class _ClassArgmax(Argmax):
    """A decision on the largest value along the class axis.

    Its `rule` is None, so that `qatkit_verify.compare` compares the classes itself and handles ties.
    """

    @property
    def title(self) -> str:
        return "top-1 class"

    @property
    def rule(self) -> None:
        return None


@dataclass(frozen=True)
class Threshold(Request, Decision):
    """A decision on which values are above a limit."""

    name: ClassVar[str] = "threshold"
    call: ClassVar[str] = "threshold(VALUE)"
    decides: ClassVar[bool] = True
    limit: float = setting(0.5, "value above which the decision is yes")

    @property
    def title(self) -> str:
        return f"side of the threshold {self.limit:g}"

    def fitted(self, seen: Seen) -> Decision:
        return self

    def decide(self, output: Array) -> Array:
        above: Array = output > self.limit
        return above


@dataclass(frozen=True)
class Equal(Request, Decision):
    """A decision on the values themselves, for classes and other whole numbers that a model returns."""

    name: ClassVar[str] = "equal"
    call: ClassVar[str] = "equal"
    decides: ClassVar[bool] = True

    @property
    def title(self) -> str:
        return "values"

    @classmethod
    def takes(cls, seen: Seen) -> bool:
        return seen.first.dtype.kind in "iub"

    def fitted(self, seen: Seen) -> Decision:
        return self


@dataclass(frozen=True)
class Cosine(Request, Decision):
    """A decision on the direction of the outputs for a sample, compared by cosine similarity."""

    name: ClassVar[str] = "cosine"
    call: ClassVar[str] = "cosine(LEAST)"
    least: float = setting(ALIKE, "cosine similarity from which two outputs count as the same", FRACTION)

    @property
    def title(self) -> str:
        return f"outputs (cosine of at least {self.least:g})"

    def fitted(self, seen: Seen) -> Decision:
        return self

    def agree(self, exact: Array, found: Array) -> Array:
        same: Array = cosines(exact, found) >= self.least
        return same


@dataclass(frozen=True)
class Function(Request, Decision):
    """A decision by a user's function from the first output [N, ...] to integers or booleans [N, ...]."""

    name: ClassVar[str] = "function"
    call: ClassVar[str] = "DOTTED.PATH"
    decides: ClassVar[bool] = True
    path: str
    function: Callable[[Array], Array]

    @property
    def title(self) -> str:
        return f"result of {self.path}"

    def fitted(self, seen: Seen) -> Decision:
        import numpy as np

        shape = list(seen.first.shape)
        try:
            found = np.asarray(self.function(seen.first))
        except (ValueError, TypeError, IndexError) as error:
            reason = f"the function failed on outputs {shape} ({first_line(error)})"
            raise ConfigError(KEY, self.path, reason=reason) from error
        if found.dtype.kind not in "iub" or found.shape[:1] != seen.first.shape[:1]:
            allowed = "a function that returns integers or booleans [N, ...] for outputs [N, ...]; for "
            raise ConfigError(
                KEY, self.path, f"{allowed}{shape} it returns {found.dtype} {list(found.shape)}"
            )
        return self

    def decide(self, output: Array) -> Array:
        return self.function(output)


def cosines(exact: Array, found: Array) -> Array:
    """Returns the cosine similarity [N] of outputs [N, ...], sample by sample; 1 if both are zero."""
    import numpy as np

    a, b = (np.asarray(one, np.float64).reshape(len(exact), -1) for one in (exact, found))
    sizes = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    both_zero = (a == 0).all(1) & (b == 0).all(1)
    return np.where(both_zero, 1.0, (a * b).sum(1) / np.where(sizes > 0, sizes, 1.0))
