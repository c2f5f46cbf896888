"""Outputs of any meaning, without targets: how near they are to those of the float model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from qatkit.tasks.base import Task
from qatkit_verify.errors import ConfigError
from qatkit_verify.records import Metric, TaskNames

if TYPE_CHECKING:
    from torch import Tensor

    from qatkit.config.schema import ScheduleConfig
    from qatkit.tasks.base import Array

ALIKE = 0.99  # cosine similarity from which two outputs for an image count as the same


class Outputs(Task):
    """Cosine similarity, image by image: for detectors, segmentation maps, embeddings and whatever is not known.

    Two models agree on an image where the cosine of the angle between their first outputs is at least `ALIKE`.
    """

    names = TaskNames(
        "outputs",
        "model of unknown outputs",
        (Metric("cosine similarity", unit=""),),
        decision=f"outputs (cosine {ALIKE})",
        outputs="outputs",
    )

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

    def decision(self, outputs: Array) -> Array:
        """Returns the outputs themselves, which `agree` compares."""
        return outputs

    def agree(self, exact: Array, found: Array) -> Array:
        return _cosines(exact, found) >= ALIKE

    @property
    def rule(self) -> Callable[[Array], Any]:
        """Two ways to compute an output agree where values are less than a step apart."""
        return _undecided

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


def _undecided(outputs: Array) -> None:
    return None


def _cosines(exact: Array, found: Array) -> Array:
    import numpy as np

    a, b = (np.asarray(one, np.float64).reshape(len(exact), -1) for one in (exact, found))
    sizes = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    both_zero = (a == 0).all(1) & (b == 0).all(1)
    return np.where(both_zero, 1.0, (a * b).sum(1) / np.where(sizes > 0, sizes, 1.0))
