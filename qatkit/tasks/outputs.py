"""Outputs of any meaning, without targets: how near they are to those of the float model.

verify.decision=cosine          the outputs point in one direction (cosine of at least 0.99)
argmax(AXIS)    the largest value along an axis is at the same place, everywhere
threshold(T)    the same values are above T
DOTTED.PATH     a function from outputs [N, ...] to integers or booleans [N, ...]
auto            argmax(1) of rows that are probabilities, threshold(0.5) of one probability,
else cosine
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qatkit.tasks.base import Task
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.records import Metric, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array

ALIKE = 0.99  # cosine similarity from which two outputs for an image count as the same


AUTO, COSINE = "auto", "cosine"
_CALL = re.compile(r"(argmax|threshold)(?:\((-?\d+(?:\.\d+)?)\))?")
_ONE = 1e-3  # how near to 1 the probabilities of a row add up


class Outputs(Task):
    """Cosine similarity, sample by sample: for detectors, segmentation maps, embeddings and whatever is not known.

    Two models agree on a sample by a decision on their first outputs.

    Args:
        decision: a value of `verify.decision`.

    Raises:
        ConfigError: it is none.
    """

    names = TaskNames(
        "outputs",
        "model of unknown outputs",
        (Metric("cosine similarity", unit=""),),
        decision=f"outputs (cosine {ALIKE})",
        outputs="outputs",
    )

    def __init__(self, decision: str = AUTO) -> None:
        self.asked = decision
        self._decide = _decider(decision)
        if self._decide is not None:
            self.names = replace(type(self).names, decision=f"decisions, {decision}")  # type: ignore[misc]

    augmentations = None
    every_output = True

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        """There are no targets: fine-tuning learns from the float model alone.

        Raises:
            ConfigError: always.
        """
        allowed = "1 with task=outputs, which has no targets"
        raise ConfigError("schedule.distill", schedule.distill, allowed)

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns the squared error as a share of the teacher's power, so that outputs of any scale weigh the same."""
        wanted = teacher.float()
        power = (wanted - wanted.mean()).square().mean().clamp_min(1e-12)
        return (output.float() - wanted).square().mean() / power

    def suited(self, outputs: Array) -> Outputs:
        import numpy as np

        if self.asked == AUTO:
            return Outputs(_guessed(outputs))
        if self._decide is not None:
            try:
                found = np.asarray(self._decide(outputs))
            except (ValueError, TypeError, IndexError) as error:
                allowed = f"a decision on outputs {list(outputs.shape)} ({first_line(error)})"
                raise ConfigError("verify.decision", self.asked, allowed) from error
            if found.dtype.kind not in "iub" or found.shape[:1] != outputs.shape[:1]:
                allowed = "a function that gives integers or booleans [N, ...] of outputs [N, ...]; of "
                allowed += f"{list(outputs.shape)} it gives {found.dtype} {list(found.shape)}"
                raise ConfigError("verify.decision", self.asked, allowed)
        return self

    def decision(self, outputs: Array) -> Array:
        """Returns the decisions; without a rule the outputs themselves, which `agree` compares."""
        return outputs if self._decide is None else self._decide(outputs)

    def agree(self, exact: Array, found: Array) -> Array:
        if self._decide is None:
            return _cosines(exact, found) >= ALIKE
        return self.decision(exact) == self.decision(found)  # type: ignore[no-any-return]

    @property
    def rule(self) -> Callable[[Array], Any] | None:
        """Without a decision, two ways to compute an output agree where values are less than a step apart."""
        if self.asked == "argmax(1)":
            return None
        return _undecided if self._decide is None else self._decide

    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns the cosine similarity to the outputs of another model, [N]."""
        return _cosines(targets, outputs)

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        return len(shape) > 0 and shape[0] % images == 0

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        return False

    def target(self, value: Any) -> Any:
        return value

    def width_of(self, shape: Sequence[int]) -> int | None:
        return int(shape[1]) if len(shape) > 1 else 1


def _decider(asked: str) -> Callable[[Array], Array] | None:
    """Returns the function of a decision; None for the cosine.

    Raises:
        ConfigError: no such decision.
    """
    if asked in (AUTO, COSINE):
        return None
    if (call := _CALL.fullmatch(asked)) is None:
        if "." not in asked:
            allowed = f"{AUTO}, {COSINE}, argmax(AXIS), threshold(VALUE), or the dotted path of a function"
            raise ConfigError("verify.decision", asked, allowed)
        found: Callable[[Array], Array] = resolve(asked, "verify.decision")
        return found
    name, value = call.groups()
    if name == "threshold":
        limit = float(value or 0.5)
        return lambda outputs: outputs > limit
    axis = int(float(value or -1))
    return lambda outputs: outputs.argmax(axis)


def _guessed(outputs: Array) -> str:
    """Returns the decision that outputs [N, ...] leave no doubt about, else the cosine."""
    if outputs.ndim != 2 or not len(outputs) or outputs.min() < 0 or outputs.max() > 1 + _ONE:
        return COSINE
    if outputs.shape[1] == 1:
        return "threshold(0.5)"
    sums = outputs.sum(1)
    return "argmax(1)" if (abs(sums - 1) < _ONE).all() else COSINE


def _undecided(outputs: Array) -> None:
    return None


def _cosines(exact: Array, found: Array) -> Array:
    import numpy as np

    a, b = (np.asarray(one, np.float64).reshape(len(exact), -1) for one in (exact, found))
    sizes = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    both_zero = (a == 0).all(1) & (b == 0).all(1)
    return np.where(both_zero, 1.0, (a * b).sum(1) / np.where(sizes > 0, sizes, 1.0))
