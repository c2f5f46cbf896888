"""Tasks whose main metric is not a mean over samples, such as a rank correlation or a ratio of sums."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING

from qatkit.tasks.base import Task

if TYPE_CHECKING:
    from qatkit.tasks.base import Array


class ByInfluence(Task):
    """A task whose standard errors follow from the influence of each sample on the metric.

    Source: the infinitesimal jackknife in Efron and Tibshirani, "An Introduction to the Bootstrap", 1993,
    chapter 21.
    """

    @abstractmethod
    def influence(self, values: Array) -> Array:
        """Returns N times the influence of each of the N samples on the metric, [N].

        The metric is taken as a fraction, not as a percentage.
        """

    def noise(self, first: Array, second: Array) -> float:
        """Returns the standard error, in points, of the difference between two models' metrics on the same samples."""
        difference = self.influence(first) - self.influence(second)
        return 100 * float(difference.std()) / math.sqrt(len(difference))

    def spread(self, score: float, images: int, values: Array | None) -> float:
        return 0.0 if values is None else 100 * float(self.influence(values).std()) / math.sqrt(images)

    def worse(self, first: Array, second: Array, sure: float) -> str:
        lost = self.mean(first) - self.mean(second)
        return f"loses {lost:.3g} points" if lost > sure * self.noise(first, second) else ""
