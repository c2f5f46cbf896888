"""Tasks whose models return logits: scores of classes along axis 1, of which the largest decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from qatkit.tasks.base import Task
from qatkit_verify import classification

if TYPE_CHECKING:
    from qatkit.tasks.base import Array
    from qatkit_verify.compare import Alike


class Logits(Task):
    """A task that decides by the largest of the logits [N, classes, ...] at each position."""

    def decision(self, outputs: Array) -> Array:
        return classification.decision(outputs)

    @property
    def rule(self) -> Callable[[Array], Array] | Alike | None:
        """None, so that outputs are compared along their class axis: the last of three axes, else axis 1."""
        return None

    def divergence(self, exact: Array, found: Array) -> float:
        return classification.divergence(exact, found)

    def power(self, outputs: Array) -> float:
        return float(((outputs - outputs.mean(1, keepdims=True)) ** 2).mean())
