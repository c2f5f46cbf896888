"""The task for outputs of any meaning, without targets: they are compared with the float model's outputs.

verify.decision=cosine   the outputs have the same direction (cosine of at least 0.99)
argmax(AXIS)             the largest value along an axis has the same index
threshold(T)             the same values are above T
equal                    the values, which are whole numbers, are equal
boxes                    detectors: the same boxes of the same class; the figure is F1
strings                  CTC recognizers: the same text
mask                     segmentation, saliency: the same pixels, as mean IoU or as the share of equal classes
DOTTED.PATH              a function from outputs [N, ...] to integers or booleans [N, ...]
auto                     the decision that the first outputs imply (`qatkit.tasks.decisions.guessed`), else cosine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qatkit.tasks.base import Agreement, Task
from qatkit.tasks.decisions import ALIKE, AUTO, Cosine, Decision, Seen, fit, request_of, undecided
from qatkit_verify.errors import ConfigError
from qatkit_verify.records import Metric, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array


STEPS = "values within a step"


class Outputs(Task):
    """A task for outputs of unknown meaning; its metric is the error relative to the float outputs.

    A decision determines whether two models agree on a sample. It is fixed once the float model has run
    (`suited`).

    Args:
        decision: a value of `verify.decision`.
        fitted: the decision for a model whose outputs are known; None if they are not known yet.
        power: the mean square of the float outputs, to which errors are relative.

    Raises:
        ConfigError: `decision` is not a value of `verify.decision`.
    """

    names = TaskNames(
        "outputs",
        "model of unknown outputs",
        (Metric("relative error", higher_is_better=False),),
        decision=f"outputs (cosine of at least {ALIKE})",
        outputs="outputs",
    )

    def __init__(self, decision: str = AUTO, fitted: Decision | None = None, power: float = 1.0) -> None:
        self.asked, self._request, self._power = decision, request_of(decision), power
        own = self._request if isinstance(self._request, Decision) else Cosine()
        self._decision = own if fitted is None else fitted
        title = self._request.title if fitted is None else fitted.title
        compared = STEPS if self._decision.rule is undecided else ""
        self.names = replace(type(self).names, decision=title, compared=compared)  # type: ignore[misc]

    augmentations = None
    every_output = True

    def loss(self, output: Tensor, targets: Tensor, schedule: ScheduleConfig) -> Tensor:
        """Raises an error, since without targets fine-tuning can only learn from the float model.

        Raises:
            ConfigError: always.
        """
        allowed = "1 with task=outputs, which has no targets"
        raise ConfigError("schedule.distill", schedule.distill, allowed)

    def distillation(self, output: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Returns the squared error relative to the teacher's variance, so the scale of an output does not matter."""
        wanted = teacher.float()
        power = (wanted - wanted.mean()).square().mean().clamp_min(1e-12)
        return (output.float() - wanted).square().mean() / power

    def suited(self, outputs: Sequence[Array], names: Sequence[str], samples: int) -> Outputs:
        import numpy as np

        decision = fit(self.asked, Seen([np.atleast_1d(one) for one in outputs], names, samples))
        power = float((decision.joined(outputs).astype("float64") ** 2).mean())
        return Outputs(self.asked, decision, max(power, 1e-30))

    def joined(self, outputs: Sequence[Array]) -> Array:
        return self._decision.joined(outputs)

    def decision(self, outputs: Array) -> Array:
        return self._decision.decide(outputs)

    def answers(self, outputs: Array) -> Array:
        """Returns the outputs themselves, since `values` compares other outputs with them."""
        return outputs

    def agree(self, exact: Array, found: Array) -> Array:
        return self._decision.agree(exact, found)

    def agreement(self) -> Agreement:
        return self._decision.agreement()

    @property
    def rule(self) -> Callable[[Array], Any] | None:
        return self._decision.rule

    def values(self, outputs: Array, targets: Any) -> Array:
        """Returns the mean squared error of each sample relative to the power of the float outputs, [N]."""
        error = (outputs.astype("float64") - targets) ** 2
        shares: Array = error.reshape(len(error), -1).mean(1) / self._power
        return shares

    def figure(self, total: Any, images: int) -> Any:
        """Returns the RMS error in percent of the RMS of the float outputs; 1 % is an SQNR of 40 dB."""
        return 100 * (total / images) ** 0.5

    def fits(self, shape: Sequence[int], images: int, width: int | None) -> bool:
        return self._request.fits(shape, images)

    def labelled(self, classes: Sequence[str], targets: Sequence[Any]) -> bool:
        return False

    def target(self, value: Any) -> Any:
        return value

    def width_of(self, shape: Sequence[int]) -> int | None:
        return int(shape[1]) if len(shape) > 1 else 1
